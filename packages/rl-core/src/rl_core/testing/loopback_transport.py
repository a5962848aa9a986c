"""A transport within one process, for testing what lies above transports in milliseconds.

`LoopbackEngine` is a whole checkpoint engine over it: sender and receivers are threads, the control
plane is the real one. Each segment is copied once for every receiver when it is started.
"""

from __future__ import annotations

import queue
import secrets
from typing import TYPE_CHECKING

import torch

from rl_core.errors import ManifestMismatchError, TransferError
from rl_core.transfer.engine import StreamingEngine
from rl_core.transfer.transport import Inlet, Outlet, Transport, TransportError
from rl_core.transfer.watch import POLL_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.interfaces import Place, TransferRole
    from rl_core.transfer.plan import Segment, TransferPlan
    from rl_core.transfer.watch import Watch

_LINES: dict[str, list[queue.SimpleQueue[torch.Tensor]]] = {}
"""A queue of copied segments for each receiver, by group."""


class LoopbackTransport(Transport):
    """Moves segments through queues."""

    def __init__(self, direct_share: float = 0.25) -> None:
        self.direct_share = direct_share
        self._group = ""
        self._rank = 0

    def offer(self, place: Place, watch: Watch) -> dict[str, str]:
        """A queue for each receiver."""
        del watch
        group = secrets.token_hex(8)
        _LINES[group] = [queue.SimpleQueue() for _ in range(place.world_size)]
        return {"group": group}

    def join(self, place: Place, properties: Mapping[str, str], watch: Watch) -> None:
        """Remember the group."""
        del watch
        self._group, self._rank = properties["group"], place.rank

    def leave(self) -> None:
        """Forget the group."""
        _LINES.pop(self._group, None)
        self._group = ""

    def outlet(self, plan: TransferPlan, watch: Watch) -> Outlet:
        """The sender's side."""
        del watch
        return LoopbackOutlet(self._lines()[1:], plan)

    def inlet(self, plan: TransferPlan, properties: Mapping[str, str], watch: Watch) -> Inlet:
        """A receiver's side."""
        del properties
        return LoopbackInlet(self._lines()[self._rank], plan, watch)

    def close(self) -> None:
        """Forget the group."""
        self.leave()

    def _lines(self) -> list[queue.SimpleQueue[torch.Tensor]]:
        try:
            return _LINES[self._group]
        except KeyError:
            raise TransportError("the sender left the group") from None


class LoopbackOutlet(Outlet):
    """Copies every segment into the queues."""

    def __init__(self, lines: list[queue.SimpleQueue[torch.Tensor]], plan: TransferPlan) -> None:
        self._lines = lines
        self._buffer = torch.empty(plan.bucket_bytes, dtype=torch.uint8)

    def buffer(self, bucket: int) -> torch.Tensor:
        """One buffer does: a segment is copied as it is started."""
        del bucket
        return self._buffer

    def start(self, segment: Segment, data: torch.Tensor) -> None:
        """Copy."""
        if len(data) != segment.nbytes:
            raise TransferError(f"segment of {segment.nbytes} bytes given {len(data)}")
        for line in self._lines:
            line.put(data.clone())

    def settle(self) -> None:
        """Nothing is under way."""

    def finish(self) -> None:
        """Nothing is under way."""


class LoopbackInlet(Inlet):
    """Puts the segments of a bucket together."""

    def __init__(
        self, line: queue.SimpleQueue[torch.Tensor], plan: TransferPlan, watch: Watch
    ) -> None:
        self._line = line
        self._plan = plan
        self._watch = watch

    def start(self, bucket: int) -> None:
        """The queue is always open."""

    def finish(self, bucket: int) -> torch.Tensor:
        """Take the bucket's segments out of the queue."""
        buffer = torch.empty(self._plan.bucket_bytes, dtype=torch.uint8)
        for segment in self._plan.buckets[bucket].segments:
            if segment.nbytes:
                buffer[segment.offset : segment.offset + segment.nbytes] = self.take(segment)
        return buffer

    def take(self, segment: Segment) -> torch.Tensor:
        """The bytes of a segment; ManifestMismatchError naming its tensors if they are too few."""
        names = ", ".join(repr(part.meta.name) for part in segment.parts)
        data = self.next(f"the segment of bucket {segment.bucket} with {names}")
        if len(data) != segment.nbytes:
            msg = f"the segment with {names} has {len(data)} bytes, not {segment.nbytes}"
            raise ManifestMismatchError(msg)
        return data

    def next(self, what: str) -> torch.Tensor:
        """Whatever comes next; `what` is waited for."""
        while True:
            try:
                return self._line.get(timeout=POLL_S)
            except queue.Empty:
                self._watch.check(what)


class LoopbackEngine(StreamingEngine):
    """A checkpoint engine whose ranks are threads of one process."""

    def __init__(self, role: TransferRole, direct_share: float = 0.25) -> None:
        super().__init__(role, LoopbackTransport(direct_share))
