"""In which pieces the buckets of a version are announced and read. Pure arithmetic.

Buckets are large for the sake of memory that is registered once; moving them whole would leave
every rank of the chain idle until its predecessor has the first bucket. So a bucket is announced
in pieces as it is filled, and read in the same pieces, all numbered in one sequence.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from rl_core.transfer.plan import BucketPlan, Part, TransferPlan


@dataclass(frozen=True)
class Piece:
    """A run of bytes of a bucket, and the parts of tensors that end in it.

    Attributes:
        sequence: its number in the version, from 1.
        offset: first byte in the bucket.
        nbytes: length.
        parts: their numbers among the bucket's parts that are not empty.
    """

    sequence: int
    offset: int
    nbytes: int
    parts: range

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class PiecePlan:
    """All pieces of a version, by bucket; the same on every rank.

    Attributes:
        pieces: of each bucket, in order.
        parts: of each bucket: its parts that are not empty, in order.
        through: of each bucket: sequence of its last piece (of the last one before it, if it has
            none).
    """

    pieces: tuple[tuple[Piece, ...], ...]
    parts: tuple[tuple[Part, ...], ...]
    through: tuple[int, ...]

    @classmethod
    def of(cls, plan: TransferPlan, piece_bytes: int) -> "PiecePlan":
        """Cut every bucket of `plan` into pieces of `piece_bytes`, the last one shorter."""
        parts = tuple(solid_parts(bucket) for bucket in plan.buckets)
        counts = [-(-_length(items) // piece_bytes) for items in parts]
        through = tuple(accumulate(counts))
        pieces = tuple(
            _cut(items, piece_bytes, last - count + 1)
            for items, count, last in zip(parts, counts, through, strict=True)
        )
        return cls(pieces, parts, through)

    def complete(self, bucket: int, nbytes: int) -> int:
        """Sequence of the last piece that is complete once `nbytes` of a bucket are filled."""
        pieces = self.pieces[bucket]
        count = bisect_right(pieces, nbytes, key=lambda piece: piece.end)
        return self.through[bucket] - len(pieces) + count

    def describe(self, bucket: int, piece: Piece) -> str:
        """A piece and the tensors that lie in it, for messages."""
        names = [
            repr(part.meta.name)
            for part in self.parts[bucket]
            if part.slot.offset < piece.end and _end(part) > piece.offset
        ]
        where = f"piece {piece.sequence} of {self.last} of the weights"
        return f"{where}, in bucket {bucket}, with {', '.join(names)}"

    @property
    def last(self) -> int:
        """Sequence of the last piece of all; 0 if there is none."""
        return self.through[-1] if self.through else 0

    @property
    def most_parts(self) -> int:
        """Largest number of parts in a bucket."""
        return max((len(items) for items in self.parts), default=0)


def solid_parts(bucket: BucketPlan) -> tuple[Part, ...]:
    """The parts that have bytes."""
    return tuple(part for part in bucket.parts if part.slot.nbytes)


def _length(parts: tuple[Part, ...]) -> int:
    return _end(parts[-1]) if parts else 0


def _end(part: Part) -> int:
    return part.slot.offset + part.slot.nbytes


def _cut(parts: tuple[Part, ...], piece_bytes: int, first: int) -> tuple[Piece, ...]:
    length, pieces, done = _length(parts), [], 0
    for number, offset in enumerate(range(0, length, piece_bytes)):
        end = min(offset + piece_bytes, length)
        before = done
        while done < len(parts) and _end(parts[done]) <= end:
            done += 1
        pieces.append(Piece(first + number, offset, end - offset, range(before, done)))
    return tuple(pieces)
