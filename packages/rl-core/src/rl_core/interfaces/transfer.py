"""What an engine that moves weights from actor ranks to rollout ranks promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from rl_core.interfaces.version import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rl_core.deadlines import CancelToken, Deadline
    from rl_core.interfaces.leases import BucketLease, TensorStream
    from rl_core.metadata import Manifest


class Endpoint(msgspec.Struct, frozen=True):
    """How the other ranks reach this one, and what it will agree to.

    Attributes:
        role: `sender` or `receiver`.
        rank: rank within its role.
        address: transport address of the control channel.
        properties: the backend's own, as text.
    """

    role: str
    rank: int
    address: str
    properties: dict[str, str] = {}


class Place(msgspec.Struct, frozen=True):
    """One rank's place in a transfer topology.

    Attributes:
        rank: rank in the transfer group; -1 takes no part in the bytes (but must drain).
        world_size: ranks in the group.
        endpoints: of every rank in the group, in order.
        predecessor: rank that this one reads from, or -1.
    """

    rank: int
    world_size: int
    endpoints: tuple[Endpoint, ...]
    predecessor: int = -1


class TransferReport(msgspec.Struct, frozen=True):
    """What one sender did.

    Attributes:
        payload_bytes: bytes of tensors, without padding.
        buckets: buckets sent.
        seconds: by phase: `gather`, `pack`, `wire`, `ack`.
        weights_digest: digest of digests, or None without light verification.
    """

    payload_bytes: int
    buckets: int
    seconds: dict[str, float]
    weights_digest: str | None = None


class TransferRole(msgspec.Struct, frozen=True):
    """Who an instance of a checkpoint engine is, and what all instances of a run agree on.

    Attributes:
        role: `sender` (actor ranks; rank 0 sends the bytes, the others drain) or `receiver`
            (rollout ranks).
        rank: rank within its role.
        device: `cpu`, `cuda` or `npu`.
        host: address of the interface that control and data sockets bind to.
        key: secret of the run, handed out by the controller; authenticates every message.
        run_id: the run; a version of another run is refused.
        bucket_megabytes: size of a bucket in MiB; never more than the payload is allocated.
        digest_kind: kind of the content digests that travel with the tensors, or None.
    """

    role: str
    rank: int
    device: str = "cpu"
    host: str = "127.0.0.1"
    key: bytes = b""
    run_id: str = ""
    bucket_megabytes: float = 2048.0
    digest_kind: str | None = None


class CheckpointEngine(ABC):
    """Moves one version of the weights from actor ranks to rollout ranks.

    Knows nothing of FSDP, vLLM or Ray. Each blocking call runs in one worker thread of its
    process, so that aborts and deadlines fire while a transfer blocks.

    Every sync is `prepare`, `build_process_group`, `send_weights` or `receive_weights`, `finalize`.
    What need not be built again is kept: as long as no sync failed and the members are the same,
    `prepare` returns an equal endpoint and `build_process_group` nothing to do. After a failure
    the endpoint differs, so that every member builds anew. A version counts as received once it
    was finalized with success; from then on it and all older ones are refused.
    """

    @abstractmethod
    def prepare(self) -> Endpoint:
        """Allocate buffers and open the control channel. Both sides."""

    @classmethod
    @abstractmethod
    def build_topology(
        cls, senders: Sequence[Endpoint], receivers: Sequence[Endpoint]
    ) -> dict[str, list[Place]]:
        """Places by role, in rank order. Pure: needs no device and no network."""

    @abstractmethod
    def build_process_group(self, place: Place, deadline: Deadline) -> None:
        """Connect to the other ranks. Collective."""

    @abstractmethod
    def send_weights(
        self, weights: TensorStream, manifest: Manifest, deadline: Deadline, cancel: CancelToken
    ) -> TransferReport:
        """Send every tensor of the stream; drains the stream also when it fails. Senders."""

    @abstractmethod
    def receive_weights(
        self, manifest: Manifest, deadline: Deadline, cancel: CancelToken
    ) -> Iterator[BucketLease]:
        """Leases in stream order, each tensor whole. Receivers."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End a transfer under way from another thread; the peers are told."""

    @abstractmethod
    def finalize(self, success: bool) -> None:
        """Close this sync. Idempotent, also after a failure; buffers may be kept."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give back buffers, sockets and groups. Idempotent; no call may follow."""


@dataclass(frozen=True)
class CheckpointBackend:
    """What a package announces under the entry-point group `minirl.checkpoint_engines`.

    Attributes:
        name: value of `checkpoint_engine.backend` that selects it.
        config_cls: `module:Class` of its dataclass, constructed from
            `checkpoint_engine.options`.
        engine: `module:Class` of the `CheckpointEngine`, called with (config, TransferRole).
        api_version: `API_VERSION` it was written for.
    """

    name: str
    config_cls: str
    engine: str
    api_version: int = API_VERSION


@dataclass(frozen=True)
class CheckedDirectory:
    """A complete checkpoint, and how far its content was checked.

    Attributes:
        path: Hugging Face directory.
        matched: tensors of which the engine answers for that what is read from `path` later is
            what was sent; 0 if files that were checked can still change.
        weights_digest: digest of the digests of those tensors, or None.
    """

    path: Path
    matched: int = 0
    weights_digest: str | None = None


@runtime_checkable
class SupportsCheckpointPath(Protocol):
    """A checkpoint engine whose receivers can load a directory themselves.

    A property of the instance: an engine may have it without light verification only.
    """

    def get_checkpoint_path(self, manifest: Manifest, deadline: Deadline) -> CheckedDirectory:
        """The complete, checked directory of this version."""
        ...


@runtime_checkable
class SupportsKeptVersions(Protocol):
    """A checkpoint engine whose receivers can read a version again that was published before."""

    def read_again(self, manifest: Manifest, deadline: Deadline) -> Iterator[BucketLease]:
        """Leases as those of `receive_weights`, without a sender and outside of any sync.

        TransferError if nothing is kept of the manifest's version.
        """
        ...
