"""Where each tensor goes in a sequence of fixed-size buckets.

Pure arithmetic: nothing here touches a tensor. Every tensor starts at a multiple of `ALIGNMENT`,
so that any dtype can be viewed in place. A tensor that fits into a bucket is never split; a larger
one gets buckets of its own and is re-joined by the receiver. Empty tensors get an empty slot.
"""

from collections.abc import Iterable, Iterator

import msgspec

from rl_core.errors import ConfigError
from rl_core.metadata import TensorMeta

ALIGNMENT = 16
"""Bytes; the widest element that travels has 8."""

MEGABYTE = 1 << 20


class Slot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of bytes of one tensor inside one bucket.

    Attributes:
        bucket: number of the bucket, from 0.
        offset: first byte in the bucket, a multiple of `ALIGNMENT`.
        start: first byte within the tensor; not 0 only in a split tensor.
        nbytes: length of the run.
    """

    bucket: int
    offset: int
    start: int
    nbytes: int


def align(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def bucket_bytes(megabytes: float, tensors: Iterable[TensorMeta]) -> int:
    """Size of a bucket: the configured one, but no larger than the whole payload.

    Args:
        megabytes: configured size, in MiB.
        tensors: everything that will travel.
    """
    configured = int(megabytes * MEGABYTE) // ALIGNMENT * ALIGNMENT
    if configured < ALIGNMENT:
        raise ConfigError(f"a bucket of {megabytes} MiB is too small; use at least 0.001")
    return min(configured, max(ALIGNMENT, sum(align(meta.nbytes) for meta in tensors)))


class BucketCursor:
    """Assigns slots to tensors as they come, without knowing what follows."""

    def __init__(self, capacity: int) -> None:
        if capacity < ALIGNMENT or capacity % ALIGNMENT:
            raise ConfigError(f"bucket capacity {capacity} is not a multiple of {ALIGNMENT} bytes")
        self._capacity = capacity
        self._bucket = 0
        self._offset = 0

    def slots(self, nbytes: int) -> Iterator[Slot]:
        """Slots for the next tensor of `nbytes` bytes, in order; their bucket never decreases."""
        if self._offset and self._offset + align(nbytes) > self._capacity:
            self._next_bucket()
        start = 0
        while True:
            take = min(nbytes - start, self._capacity - self._offset)
            yield Slot(self._bucket, self._offset, start, take)
            start += take
            self._offset += align(take)
            if start >= nbytes:
                return
            self._next_bucket()

    def _next_bucket(self) -> None:
        self._bucket += 1
        self._offset = 0


def plan(tensors: Iterable[TensorMeta], capacity: int) -> list[list[tuple[TensorMeta, Slot]]]:
    """The contents of every bucket of a stream."""
    cursor = BucketCursor(capacity)
    buckets: list[list[tuple[TensorMeta, Slot]]] = []
    for meta in tensors:
        for slot in cursor.slots(meta.nbytes):
            if slot.bucket == len(buckets):
                buckets.append([])
            buckets[slot.bucket].append((meta, slot))
    return buckets
