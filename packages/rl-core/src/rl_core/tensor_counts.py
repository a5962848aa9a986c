"""How many tensors of a version were looked at, and how many were as they should be."""

from collections.abc import Iterator

import msgspec


class TensorCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a check of weights found, in tensors.

    Attributes:
        matched: their digest was recomputed and agreed.
        mismatched: their digest, shape or dtype differs.
        missing: announced, and had not come when the stream ended.
        unexpected: came without having been announced, or once more.
        unverifiable: came without a digest.
    """

    matched: int = 0
    mismatched: int = 0
    missing: int = 0
    unexpected: int = 0
    unverifiable: int = 0

    def __add__(self, other: "TensorCounts") -> "TensorCounts":
        """Of two ranks together."""
        return TensorCounts(*(mine + theirs for mine, theirs in self._pairs(other)))

    def __or__(self, other: "TensorCounts") -> "TensorCounts":
        """Of one rank, from two accounts of it: the larger number of each kind."""
        return TensorCounts(*(max(pair) for pair in self._pairs(other)))

    @property
    def clean(self) -> bool:
        """Whether every tensor was verified and none was wrong."""
        return self == TensorCounts(matched=self.matched)

    def _pairs(self, other: "TensorCounts") -> Iterator[tuple[int, int]]:
        return zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
