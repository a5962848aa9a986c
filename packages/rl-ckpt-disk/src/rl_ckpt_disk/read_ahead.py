"""Receiver: buckets read from a checkpoint, one ahead of their consumer."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_core.buckets import align
from rl_core.deadlines import CancelToken
from rl_core.interfaces import LeasedTensor
from rl_core.torch import from_bytes
from rl_core.transfer.watch import POLL_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_ckpt_disk.checkpoint import Checkpoint
    from rl_core.metadata import TensorMeta
    from rl_core.transfer.watch import Watch


@dataclass(frozen=True)
class Bucket:
    """Tensors that are read and lent together.

    Attributes:
        tensors: in stream order.
        buffer: which of the read buffers they go into.
    """

    tensors: tuple[TensorMeta, ...]
    buffer: int

    @property
    def nbytes(self) -> int:
        """Length of the buffer that it needs, with every tensor aligned."""
        return sum(align(meta.nbytes) for meta in self.tensors)


LARGE = 2
"""Number of the buffer for single tensors that are larger than a bucket."""


def buckets(tensors: Sequence[TensorMeta], capacity: int) -> list[Bucket]:
    """Group tensors, in stream order; buffers 0 and 1 take turns, `LARGE` is for large ones.

    Args:
        tensors: everything.
        capacity: of a bucket in bytes.
    """
    groups: list[list[TensorMeta]] = []
    used = 0
    for meta in tensors:
        if not groups or used + align(meta.nbytes) > capacity:
            groups.append([])
            used = 0
        groups[-1].append(meta)
        used += align(meta.nbytes)
    made: list[Bucket] = []
    for number, group in enumerate(groups):
        buffer = LARGE if align(group[0].nbytes) > capacity else number % 2
        made.append(Bucket(tuple(group), buffer))
    return made


class ReadBuffers:
    """Host memory to read into: two buckets and the largest tensor; kept from sync to sync."""

    def __init__(self) -> None:
        self._tensors = dict.fromkeys((0, 1, LARGE), _nothing())

    def reserve(self, plan: Sequence[Bucket]) -> None:
        """Make every buffer as long as its longest bucket, unless it is long enough."""
        for number in self._tensors:
            longest = max((bucket.nbytes for bucket in plan if bucket.buffer == number), default=0)
            if self._tensors[number].numel() < longest:
                self._tensors[number] = _nothing()  # never the old and the new one at once
                self._tensors[number] = torch.empty(longest, dtype=torch.uint8)

    def of(self, bucket: Bucket) -> torch.Tensor:
        """Flat uint8 memory for a bucket of the plan that was reserved for."""
        return self._tensors[bucket.buffer]

    def drop(self) -> None:
        """Give the memory back."""
        self._tensors = dict.fromkeys(self._tensors, _nothing())


class ReadAhead:
    """Reads the next bucket, in a thread of its own, while the consumer has the one before.

    The checkpoint's files are closed by that thread: nobody closes a file that is being read, and
    a disk that hangs holds up nobody but the thread.
    """

    def __init__(self, checkpoint: Checkpoint, buffers: ReadBuffers, watch: Watch) -> None:
        """`watch` without news: it is looked at by the reading thread."""
        self._checkpoint = checkpoint
        self._buffers = buffers
        self._stop = CancelToken()
        self._watch = watch.also(self._stop)
        self._thread = ThreadPoolExecutor(1, "checkpoint-read")

    def read(self, plan: Sequence[Bucket], watch: Watch) -> Iterator[list[LeasedTensor]]:
        """The tensors of each bucket; those of the last one are done with when it goes on.

        Args:
            plan: what to read.
            watch: ends a wait for the reading thread.
        """
        self._buffers.reserve(plan)
        ahead: Future[list[LeasedTensor]] | None = None
        for number, bucket in enumerate(plan):
            current = ahead or self._thread.submit(self._one, bucket)
            entries = _result(current, watch)
            following = plan[number + 1] if number + 1 < len(plan) else None
            ahead = None
            if following is not None and following.buffer != bucket.buffer:
                ahead = self._thread.submit(self._one, following)
            yield entries

    def close(self, *, wait_for_it: bool) -> None:
        """Stop reading and close the files."""
        self._stop.cancel("nobody reads on")
        self._thread.submit(self._checkpoint.close)
        self._thread.shutdown(wait=wait_for_it)

    def _one(self, bucket: Bucket) -> list[LeasedTensor]:
        buffer = self._buffers.of(bucket)
        entries, offset = [], 0
        for meta in bucket.tensors:
            data = buffer[offset : offset + meta.nbytes]
            self._checkpoint.read(meta, data, self._watch)
            digest = self._checkpoint.marker.digests.get(meta.name)
            entries.append(LeasedTensor(meta, from_bytes(data, meta), digest))
            offset += align(meta.nbytes)
        return entries


def _result(future: Future[list[LeasedTensor]], watch: Watch) -> list[LeasedTensor]:
    while not wait([future], POLL_S).done:
        watch.check("the checkpoint to be read")
    return future.result()


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)
