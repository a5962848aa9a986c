"""Which bytes of a version travel in which bucket. Pure arithmetic, the same on every side.

Because it follows from the manifest and the parameters of the handshake alone, receivers can ask
for bytes before they are announced, and an announcement that departs from it is an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rl_core.buckets import Slot, plan
from rl_core.metadata import TensorMeta


@dataclass(frozen=True)
class Part:
    """A tensor, or one bucket's share of a tensor that is larger than a bucket."""

    meta: TensorMeta
    slot: Slot

    @property
    def first(self) -> bool:
        """Whether the tensor begins here."""
        return self.slot.start == 0

    @property
    def last(self) -> bool:
        """Whether the tensor ends here."""
        return self.slot.start + self.slot.nbytes == self.meta.nbytes


@dataclass(frozen=True)
class Segment:
    """A run of bytes of a bucket that travels in one piece.

    Attributes:
        bucket: number of the bucket.
        offset: first byte in the bucket.
        nbytes: length; 0 if it consists of empty tensors.
        parts: what lies in it, in order.
        direct: whether it is one large part, which may be sent from the tensor's own storage.
    """

    bucket: int
    offset: int
    nbytes: int
    parts: tuple[Part, ...]
    direct: bool


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: its segments, in order; `nbytes` of it are used."""

    number: int
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from its start to the end of its last part."""
        return max((segment.offset + segment.nbytes for segment in self.segments), default=0)

    @property
    def parts(self) -> list[Part]:
        """Everything in it, in order."""
        return [part for segment in self.segments for part in segment.parts]


@dataclass(frozen=True)
class TransferPlan:
    """All buckets of a version.

    Attributes:
        bucket_bytes: capacity of each.
        buckets: in the order in which they travel.
    """

    bucket_bytes: int
    buckets: tuple[BucketPlan, ...]

    @classmethod
    def of(
        cls, tensors: Sequence[TensorMeta], bucket_bytes: int, direct_bytes: int = 0
    ) -> "TransferPlan":
        """Plan the tensors, in stream order.

        Args:
            tensors: everything that travels.
            bucket_bytes: capacity of a bucket.
            direct_bytes: parts of tensors at least this large get a segment of their own; 0 packs
                everything.
        """
        buckets = [
            BucketPlan(
                number, tuple(_segments(number, [Part(*item) for item in items], direct_bytes))
            )
            for number, items in enumerate(plan(tensors, bucket_bytes))
        ]
        return cls(bucket_bytes, tuple(buckets))

    @property
    def joined_bytes(self) -> int:
        """Size of the largest tensor that is split over buckets, or 0."""
        sizes = [
            part.meta.nbytes for bucket in self.buckets for part in bucket.parts if not part.last
        ]
        return max(sizes, default=0)


def _segments(number: int, parts: list[Part], direct_bytes: int) -> list[Segment]:
    segments: list[Segment] = []
    run: list[Part] = []
    for part in parts:
        if direct_bytes and part.meta.nbytes >= direct_bytes:
            segments += [_segment(number, run, direct=False)] if run else []
            segments.append(_segment(number, [part], direct=True))
            run = []
        else:
            run.append(part)
    return segments + ([_segment(number, run, direct=False)] if run else [])


def _segment(number: int, parts: list[Part], *, direct: bool) -> Segment:
    offset, last = parts[0].slot.offset, parts[-1].slot
    return Segment(number, offset, last.offset + last.nbytes - offset, tuple(parts), direct)
