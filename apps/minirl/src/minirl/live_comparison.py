"""What the ranks of one replica hold, compared with what they must hold, and told in full."""

import math
from collections.abc import Iterator, Sequence

import msgspec

from rl_core.errors import VerificationError
from rl_core.layout import LayoutSpec
from rl_core.metadata import DTYPE_BYTES
from rl_core.rollout.expectation import Expectation
from rl_core.rollout.live_check import LiveCheck, check_live
from rl_core.tensor_counts import TensorCounts

MISMATCHED, MISSING, UNEXPECTED = "mismatched", "missing", "unexpected"
"""Kinds of bad tensors."""


class BadTensor(msgspec.Struct, frozen=True):
    """One run-time tensor of one rank that is not what it must be.

    Attributes:
        kind: `mismatched`, `missing` or `unexpected`.
        tp_rank: the rank.
        name: run-time name.
        slices: Hugging Face tensors that it is made of, and what of them; empty for a buffer.
        shape: what it must have; empty if nothing was expected.
        dtype: the same.
        expected: digest that it must have, or None.
        live: digest of what the engine holds, or None.
        first_difference: index of the first element that differs, where that was looked for: in
            as many tensors as can be held at once.
    """

    kind: str
    tp_rank: int
    name: str
    slices: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: str = ""
    expected: str | None = None
    live: str | None = None
    first_difference: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Of what is expected; 0 if nothing is."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype] if self.dtype else 0

    def __str__(self) -> str:
        made = f" (of {', '.join(self.slices)})" if self.slices else ""
        where = f" from element {list(self.first_difference)}" if self.first_difference else ""
        return f"{self.kind} on rank {self.tp_rank}: {self.name!r}{made}{where}"


class RankComparison(msgspec.Struct):
    """One rank.

    Attributes:
        check: what was found.
        expected: what it must hold.
        live: digests of what it holds, by run-time name.
        bad: what is wrong.
    """

    check: LiveCheck
    expected: Expectation
    live: dict[str, str]
    bad: list[BadTensor]


def compare_replica(
    spec: LayoutSpec, expected: Sequence[Expectation], live: Sequence[dict[str, str]]
) -> list[RankComparison]:
    """Compare all ranks of a replica.

    Args:
        spec: the layout that the expectations were made with.
        expected: of every rank, in rank order.
        live: digests by run-time name, of every rank, in rank order.

    Errors: VerificationError if the ranks are not the same, or digests are of another kind.
    """
    if [one.tp_rank for one in expected] != list(range(len(live))):
        msg = f"{len(live)} ranks gave live digests, expected are {[e.tp_rank for e in expected]}"
        raise VerificationError(msg)
    found = []
    for one, held in zip(expected, live, strict=True):
        check = check_live(spec, one, held)
        found.append(RankComparison(check, one, held, list(_bad_tensors(check, one, held))))
    return found


def counts_of(ranks: Sequence[RankComparison]) -> TensorCounts:
    """Run-time tensors of all ranks together."""
    return sum((rank.check.counts for rank in ranks), TensorCounts())


def bad_tensors(ranks: Sequence[RankComparison]) -> list[BadTensor]:
    """What is wrong on any rank."""
    return [bad for rank in ranks for bad in rank.bad]


def _bad_tensors(
    check: LiveCheck, expected: Expectation, live: dict[str, str]
) -> Iterator[BadTensor]:
    for kind in (MISMATCHED, MISSING, UNEXPECTED):
        for name in getattr(check, kind):
            wanted = expected.tensors.get(name)
            bad = BadTensor(kind, check.tp_rank, name, live=live.get(name))
            if wanted is not None:
                bad = msgspec.structs.replace(
                    bad,
                    slices=wanted.slices,
                    shape=wanted.shape,
                    dtype=wanted.dtype,
                    expected=wanted.digest,
                )
            yield bad
