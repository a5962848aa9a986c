"""Checkpoint engines with one thing wrong each, to show that the contract finds it.

They are the loopback engine with a defect of a kind that users of comparable systems have met. An
engine without a defect is among them, as the control.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import TransferError
from rl_core.interfaces import CheckpointBackend
from rl_core.testing.loopback_transport import (
    LoopbackInlet,
    LoopbackOutlet,
    LoopbackTransport,
)
from rl_core.torch import as_bytes
from rl_core.transfer.engine import StreamingEngine
from rl_core.transfer.messages import BucketReady

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rl_core.deadlines import CancelToken, Deadline
    from rl_core.interfaces import BucketLease, TensorStream, TransferReport, TransferRole
    from rl_core.metadata import Manifest, TensorMeta
    from rl_core.transfer.plan import Segment, TransferPlan
    from rl_core.transfer.transport import Inlet, Outlet
    from rl_core.transfer.watch import Watch


class Defect(StrEnum):
    """What is wrong with an engine."""

    NONE = "nothing"
    ENQUEUED = "a segment counts as sent when it is queued, and its memory is used again"
    UNORDERED = "a tensor is read after the stream has gone on"
    EARLY_ACK = "the last bucket is acknowledged before its reader has left it"
    LATE_WRITER = "the buffer of a lease is written while the lease is open"
    UNALIGNED = "tensors are packed without alignment"
    OVERSIZED = "a tensor larger than a bucket fails an assertion"
    LOST_METADATA = "the first announcement is lost, as on a socket without acknowledgements"
    NOTHING_MOVED = "success is reported and no byte was moved"
    SWALLOWED = "an error in the middle of the stream is swallowed; all that follows is one off"
    IGNORED_STATUS = "a failed read is not noticed, and the buffer keeps what was in it"
    XOR_DIGEST = "digests are sums that do not depend on the order of the words"
    ANY_VERSION = "every version is accepted"
    UNDRAINED = "the stream is left when the sync fails"
    REPEATED = "the second sync sends the buckets of the first"
    BARE_TIMEOUT = "what never came is waited for in vain, and nothing says what it was"
    SHORT_READ = "bytes that are too few are taken for a broken connection"
    UNSIGNED = "messages are believed whoever has signed them"
    PATIENT = "an acknowledgement is waited for without a deadline"
    LATE_DIGEST = "digests are taken of what was packed, not of what the trainer gave"
    UNCOUNTED_ACKS = "an acknowledgement counts for whatever bucket was due"
    UNREAD_CONTENTS = "what is announced for a bucket is not compared with the plan"
    ANY_TRAILER = "the digest of digests at the end is not looked at"
    ANY_KIND = "a sender without digests is good enough for a receiver that insists on them"
    MALFORMED = "a message that cannot be decoded raises what the decoder raises"


@dataclass(frozen=True)
class DefectConfig:
    """Options of the loopback backend."""

    defect: str = Defect.NONE.name
    """Name of a `Defect`."""


class DefectiveEngine(StreamingEngine):
    """The loopback engine, with the defect that its options name."""

    def __init__(self, config: DefectConfig, role: TransferRole) -> None:
        self._defect = Defect[config.defect]
        super().__init__(role, _Transport(self._defect))
        if self._defect is Defect.LOST_METADATA:
            self._lose_first_announcement()
        if self._defect is Defect.ANY_VERSION:
            self._received = _Forgetful()

    def send_weights(
        self, weights: TensorStream, manifest: Manifest, deadline: Deadline, cancel: CancelToken
    ) -> TransferReport:
        """With a stream that is read too late, or left too early."""
        if self._defect is Defect.UNORDERED:
            weights = _one_ahead(weights)
        if self._defect is Defect.UNDRAINED:
            weights = _Once(weights)
        return super().send_weights(weights, manifest, deadline, cancel)

    def receive_weights(
        self, manifest: Manifest, deadline: Deadline, cancel: CancelToken
    ) -> Iterator[BucketLease]:
        """With leases whose memory is not theirs, or that are settled too early."""
        leases = super().receive_weights(manifest, deadline, cancel)
        if self._defect is Defect.LATE_WRITER:
            return _written_late(leases)
        if self._defect is Defect.EARLY_ACK:
            return _one_behind(leases)
        return leases

    def _lose_first_announcement(self) -> None:
        tell = self._peers.tell
        lost: list[BucketReady] = []

        def telling(message: Any, watch: Watch) -> None:
            if isinstance(message, BucketReady) and not lost:
                lost.append(message)
            else:
                tell(message, watch)

        self._peers.tell = telling  # type: ignore[method-assign]


# --------------------------------------------------------------------------- streams, leases


def _one_ahead(weights: TensorStream) -> TensorStream:
    """Draws each tensor before the previous one was read."""
    previous = next(weights, None)
    while previous is not None:
        following = next(weights, None)
        yield previous
        previous = following


class _Once:
    """An iterator that ends for good when it is abandoned: draining it draws nothing."""

    def __init__(self, weights: TensorStream) -> None:
        self._weights = weights
        self._drained = False

    def __iter__(self) -> _Once:
        self._drained = True
        return self

    def __next__(self) -> tuple[TensorMeta, torch.Tensor]:
        if self._drained:
            raise StopIteration
        return next(self._weights)


class _Forgetful(dict[str, Any]):
    """Keeps no version."""

    def __setitem__(self, run_id: str, version: Any) -> None:
        return


def _written_late(leases: Iterator[BucketLease]) -> Iterator[BucketLease]:
    for lease in leases:
        for entry in lease.entries:
            threading.Timer(0.01, _scribble, [entry.tensor]).start()
        yield lease


def _scribble(tensor: torch.Tensor) -> None:
    as_bytes(tensor).fill_(0x55)


def _one_behind(leases: Iterator[BucketLease]) -> Iterator[BucketLease]:
    """Leaves each lease towards the engine before the consumer has it."""
    held: BucketLease | None = None
    for lease in leases:
        copies = type(lease)([_copied(entry) for entry in lease.entries])
        with lease:
            pass
        if held is not None:
            yield held
        held = copies
    if held is not None:
        yield held


def _copied(entry: Any) -> Any:
    return type(entry)(entry.meta, entry.tensor.clone(), entry.digest)


# --------------------------------------------------------------------------- transports


class _Transport(LoopbackTransport):
    def __init__(self, defect: Defect) -> None:
        super().__init__()
        self._defect = defect
        self._memory: list[torch.Tensor] = []

    def outlet(self, plan: TransferPlan, watch: Watch) -> Outlet:
        del watch
        return _Outlet(self._lines()[1:], plan, self._defect, self._memory)

    def inlet(self, plan: TransferPlan, properties: Mapping[str, str], watch: Watch) -> Inlet:
        del properties
        made: Inlet = LoopbackInlet(self._lines()[self._rank], plan, watch)
        if self._defect is Defect.IGNORED_STATUS:
            made = _CarelessInlet(self._lines()[self._rank], plan, watch)
        if self._defect in (Defect.BARE_TIMEOUT, Defect.SHORT_READ):
            made = _SilentInlet(self._lines()[self._rank], plan, watch)
        return made


class _Outlet(LoopbackOutlet):
    def __init__(
        self, lines: Any, plan: TransferPlan, defect: Defect, memory: list[torch.Tensor]
    ) -> None:
        super().__init__(lines, plan)
        self._defect = defect
        self._memory = memory
        self._repeating = len(memory) > 0
        self._started = 0
        self._queued: list[torch.Tensor] = []

    def start(self, segment: Segment, data: torch.Tensor) -> None:
        self._started += 1
        match self._defect:
            case Defect.ENQUEUED:
                self._queued.append(data)
            case Defect.NOTHING_MOVED:
                super().start(segment, torch.zeros_like(data))
            case Defect.SWALLOWED if self._started == 4:
                return
            case Defect.REPEATED if self._repeating:
                super().start(segment, self._memory[self._started - 1])
            case _:
                self._memory.append(data.clone())
                super().start(segment, data)

    def close_bucket(self, bucket: int) -> None:
        del bucket
        queued, self._queued = self._queued, []
        for data in queued:
            for line in self._lines:
                line.put(data.clone())


class _CarelessInlet(LoopbackInlet):
    def finish(self, bucket: int) -> torch.Tensor:
        buffer = super().finish(bucket)
        return torch.full_like(buffer, 7) if bucket == 1 else buffer


class _SilentInlet(LoopbackInlet):
    def take(self, segment: Segment) -> torch.Tensor:
        data = self.next("bytes")
        if len(data) != segment.nbytes:
            raise TransferError("the connection broke off")
        return data


LOOPBACK = CheckpointBackend(
    "loopback",
    "rl_core.testing.checkpoint_defects:DefectConfig",
    "rl_core.testing.checkpoint_defects:DefectiveEngine",
)
"""The backend, with `defect` as its option."""
