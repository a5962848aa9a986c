"""Bucket transport by broadcast within one group."""

from __future__ import annotations

import gc
import logging
import secrets
from typing import TYPE_CHECKING

from torch import distributed as dist

from rl_ckpt_hccl.communicator import Communicator, Transmission
from rl_ckpt_hccl.process_group import Library, check_torch
from rl_ckpt_hccl.store import join_store, serve_store
from rl_core.logs import kv
from rl_core.transfer.buffers import BucketBuffers
from rl_core.transfer.transport import BUFFERS, Inlet, Outlet, Transport, TransportError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rl_core.interfaces import Place
    from rl_core.transfer.plan import Segment, TransferPlan
    from rl_core.transfer.watch import Watch

logger = logging.getLogger(__name__)


class BroadcastTransport(Transport):
    """A group is built once for its members, and used until one of them leaves."""

    # One more than there are buffers: while a receiver reads bucket n and gets n + 1, the sender
    # packs n + 2 already.
    window = BUFFERS + 1

    def __init__(self, library: Library, direct_share: float, connect_timeout_s: float) -> None:
        check_torch(library.backend)
        self.direct_share = direct_share
        self._library = library
        self._connect_timeout_s = connect_timeout_s
        self._buffers = BucketBuffers(library.device)
        self._store: dist.TCPStore | None = None
        self._communicator: Communicator | None = None
        self._broken = False

    def offer(self, place: Place, watch: Watch) -> dict[str, str]:
        """A new store and a name that no other group has."""
        del place
        self._collect()
        self._store, address = serve_store(self._library.host, self._seconds(watch))
        return {"store": address, "group": secrets.token_hex(8), "library": self._library.backend}

    def join(self, place: Place, properties: Mapping[str, str], watch: Watch) -> None:
        """Build the process group."""
        if properties.get("library") != self._library.backend:
            theirs, mine = properties.get("library"), self._library.backend
            raise TransportError(f"the sender broadcasts with {theirs}, this receiver with {mine}")
        if self._store is None:
            self._collect()
            self._store = join_store(properties["store"], self._seconds(watch))
        store = dist.PrefixStore(properties["group"], self._store)
        ranks = (place.rank, place.world_size)
        watch = watch.sooner(self._connect_timeout_s)
        self._communicator = Communicator.connect(self._library, store, ranks, watch)
        logger.debug(
            "broadcast group built: %s",
            kv(backend=self._library.backend, rank=place.rank, ranks=place.world_size),
        )

    def leave(self) -> None:
        """Break the group off; works that have not begun fail on every rank.

        Buffers of a work that was under way are not used again: it may still write into them, or
        read from them, and keeps them alive as long as that.
        """
        if self._communicator is not None and not self._communicator.leave():
            self._buffers.drop()
        self._communicator = self._store = None
        self._broken = True

    def outlet(self, plan: TransferPlan, watch: Watch) -> Outlet:
        """Sender: buffers for `plan`, and the group to broadcast in."""
        self._buffers.fit(plan)
        return BroadcastOutlet(self._connected(), self._buffers, watch, self._library.device)

    def inlet(self, plan: TransferPlan, properties: Mapping[str, str], watch: Watch) -> Inlet:
        """Receiver: buffers for `plan`, and the group to receive in."""
        del properties
        self._buffers.fit(plan)
        return BroadcastInlet(self._connected(), self._buffers, plan, watch)

    def close(self) -> None:
        """Leave the group, drop the buffers."""
        self.leave()
        self._buffers.drop()
        self._collect()

    def _collect(self) -> None:
        """Free what the tracebacks of a failure still hold of a group: ports, files, memory.

        An exception and the frames that it passed refer to each other, so that only the collector
        ends them.
        """
        if self._broken:
            gc.collect()
        self._broken = False

    def _connected(self) -> Communicator:
        if self._communicator is None:
            raise TransportError("the group was broken off")
        return self._communicator

    def _seconds(self, watch: Watch) -> float:
        return watch.deadline.sooner(self._connect_timeout_s).remaining()


class BroadcastOutlet(Outlet):
    """Broadcasts from two buckets in turn, and from the storage of large tensors."""

    def __init__(
        self, communicator: Communicator, buffers: BucketBuffers, watch: Watch, device: str
    ) -> None:
        self.device = device
        self._communicator = communicator
        self._buffers = buffers
        self._watch = watch
        self._packed: dict[int, list[Transmission]] = {}
        self._direct: list[Transmission] = []

    def buffer(self, bucket: int) -> torch.Tensor:
        """The buffer that bucket `bucket - BUFFERS` has left."""
        for number in [number for number in self._packed if number <= bucket - BUFFERS]:
            self._wait(self._packed.pop(number))
        return self._buffers.of(bucket)

    def start(self, segment: Segment, data: torch.Tensor) -> None:
        """Begin to broadcast."""
        what = f"the broadcast of bucket {segment.bucket}"
        transmission = self._communicator.broadcast(data, what, self._watch)
        if segment.direct:
            self._direct.append(transmission)
        else:
            self._packed.setdefault(segment.bucket, []).append(transmission)

    def settle(self) -> None:
        """Until the large tensors have been read."""
        self._wait(self._direct)
        self._direct = []

    def finish(self) -> None:
        """Until everything has been read."""
        self.settle()
        for transmissions in self._packed.values():
            self._wait(transmissions)
        self._packed.clear()

    def _wait(self, transmissions: list[Transmission]) -> None:
        for transmission in transmissions:
            self._communicator.wait(transmission, self._watch)


class BroadcastInlet(Inlet):
    """Receives into two buckets in turn, the next one while the last one is being read."""

    def __init__(
        self, communicator: Communicator, buffers: BucketBuffers, plan: TransferPlan, watch: Watch
    ) -> None:
        self._communicator = communicator
        self._buffers = buffers
        self._plan = plan
        self._watch = watch
        self._coming: dict[int, list[Transmission]] = {}

    def start(self, bucket: int) -> None:
        """Join in the broadcasts of a bucket."""
        buffer, what = self._buffers.of(bucket), f"the bytes of bucket {bucket}"
        self._coming[bucket] = [
            self._communicator.broadcast(
                buffer[segment.offset : segment.offset + segment.nbytes], what, self._watch
            )
            for segment in self._plan.buckets[bucket].segments
            if segment.nbytes
        ]

    def finish(self, bucket: int) -> torch.Tensor:
        """Until all of its bytes are there."""
        for transmission in self._coming.pop(bucket):
            self._communicator.wait(transmission, self._watch)
        return self._buffers.of(bucket)
