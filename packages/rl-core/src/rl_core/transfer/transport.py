"""What a transport implements to become a checkpoint engine: only the moving of bytes.

`rl_core.transfer.engine.StreamingEngine` does everything else: handshake, numbering,
acknowledgement, packing, manifests, digests, errors, deadlines.

Threads: all methods run in the worker thread of the engine's caller. Every wait looks at the
`Watch` it was given (`Watch.check`), at least each `POLL_S`. When the transport itself fails it
raises `TransportError`; foreign exceptions are translated there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rl_core.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rl_core.interfaces import Place
    from rl_core.transfer.plan import Segment, TransferPlan
    from rl_core.transfer.watch import Watch

BUFFERS = 2
"""Bucket buffers on each side; bucket n lives in buffer n % BUFFERS."""


class TransportError(TransferError):
    """The bytes could not be moved; the control plane is then asked whether a peer knows why."""


class Outlet(ABC):
    """The sender's side of a transport, for one version.

    Bucket `n` is filled after bucket `n - BUFFERS` left its buffer, which `buffer` waits for.

    Attributes:
        device: `cpu`, `cuda` or `npu`: where `start` wants its bytes.
    """

    device: str = "cpu"

    def properties(self) -> dict[str, str]:
        """What receivers must know, sent in `Begin`."""
        return {}

    def introduce(self, receivers: Mapping[int, Mapping[str, str]]) -> dict[int, dict[str, str]]:
        """What each receiver must know of the others, by rank in the group, sent in `Go`.

        Args:
            receivers: `Inlet.properties` of each, by rank in the group.
        """
        del receivers
        return {}

    def open_bucket(self, bucket: int) -> None:
        """Wait until that bucket may be filled, where `start` should not wait for it itself."""
        del bucket

    @abstractmethod
    def buffer(self, bucket: int) -> Tensor:
        """Flat uint8 buffer for that bucket, of at least the bucket's size; waits until free."""

    @abstractmethod
    def start(self, segment: Segment, data: Tensor) -> None:
        """Begin to move a segment; may return before its bytes have left.

        Segments of a bucket come in order, one bucket after the other; empty ones do not come.

        Args:
            segment: which bytes.
            data: flat uint8, contiguous, `segment.nbytes` long: a view of `buffer(segment.bucket)`
                or, for a direct segment, of the tensor's own storage.
        """

    def close_bucket(self, bucket: int) -> None:
        """All segments of that bucket were started."""
        del bucket

    @abstractmethod
    def settle(self) -> None:
        """Wait until every byte started from a tensor's own storage has been read."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until every byte has left; after it, all receivers are known to be done."""


class Inlet(ABC):
    """A receiver's side of a transport, for one version."""

    def properties(self) -> dict[str, str]:
        """What the others must know, sent in `Ready`."""
        return {}

    def introduced(self, properties: Mapping[str, str]) -> None:
        """Take what came in `Go`."""
        del properties

    @abstractmethod
    def start(self, bucket: int) -> None:
        """Ask for the bytes of a bucket; must not wait for them.

        Called in order; bucket `n` is asked for once nobody reads bucket `n - BUFFERS`.
        """

    @abstractmethod
    def finish(self, bucket: int) -> Tensor:
        """Wait for the bytes of a bucket that was started; its flat uint8 buffer."""

    def close(self) -> None:
        """All receivers are done with this version."""
        return


class Transport(ABC):
    """Moves bytes between the members of a group. One instance in each engine, kept over syncs.

    Attributes:
        window: how many buckets may be on their way without all receivers having acknowledged.
        direct_share: tensors of at least this share of a bucket travel in segments of their own,
            if possible from their own storage; 0 packs everything.
    """

    window: int = BUFFERS
    direct_share: float = 0.0

    def properties(self) -> dict[str, str]:
        """What belongs into this rank's `Endpoint`."""
        return {}

    def direct_bytes(self, bucket_bytes: int) -> int:
        """Size from which tensors get segments of their own; 0 packs everything."""
        return int(bucket_bytes * self.direct_share)

    @abstractmethod
    def offer(self, place: Place, watch: Watch) -> dict[str, str]:
        """Sender: prepare a new group; what members need to connect, sent in `Joined`."""

    @abstractmethod
    def join(self, place: Place, properties: Mapping[str, str], watch: Watch) -> None:
        """All: connect to a group that the sender offered. Collective."""

    @abstractmethod
    def leave(self) -> None:
        """Give up the group at once, also with bytes under way. Idempotent; never raises."""

    @abstractmethod
    def outlet(self, plan: TransferPlan, watch: Watch) -> Outlet:
        """Sender: begin a version."""

    @abstractmethod
    def inlet(self, plan: TransferPlan, properties: Mapping[str, str], watch: Watch) -> Inlet:
        """Receiver: begin a version; `properties` came in `Begin`."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything. Idempotent."""
