"""Compares what a rank of an engine holds with what it must hold."""

import msgspec

from rl_core import digests
from rl_core.layout import LayoutSpec, match
from rl_core.rollout.expectation import Expectation
from rl_core.tensor_counts import TensorCounts


class LiveCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was found on one rank; every name is in one of these.

    Attributes:
        tp_rank: the rank.
        matched: run-time tensors whose content is the expected one.
        mismatched: those whose content, shape or dtype is not.
        missing: expected and not there.
        unexpected: there, and of a kind that the table knows, but the version has nothing for it.
        unverifiable: what the table does not cover, by Hugging Face or run-time name, and why.
    """

    tp_rank: int
    matched: tuple[str, ...]
    mismatched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    unverifiable: dict[str, str]

    @property
    def counts(self) -> TensorCounts:
        """How many there are of each."""
        return TensorCounts(
            len(self.matched),
            len(self.mismatched),
            len(self.missing),
            len(self.unexpected),
            len(self.unverifiable),
        )

    @property
    def clean(self) -> bool:
        """Whether everything was compared and nothing differs."""
        return self.counts == TensorCounts(matched=len(self.matched))


def check_live(spec: LayoutSpec, expected: Expectation, live: dict[str, str]) -> LiveCheck:
    """Compare one rank's live digests with its expectation.

    Args:
        spec: the layout that the expectation was made with.
        expected: of the rank.
        live: digests by run-time name, from the rank itself.

    Errors: VerificationError for digests of another kind.
    """
    known = expected.tensors
    both = [name for name in known if name in live]
    matched = tuple(name for name in both if digests.same(known[name].digest, live[name]))
    strange = [name for name in live if name not in known and name not in expected.unverifiable]
    unexpected = tuple(name for name in strange if spec.covers(name))
    unverifiable = dict(expected.unverifiable)
    for name in strange:
        if not spec.covers(name):
            declared = any(match(pattern, name) is not None for pattern in spec.unknown)
            unverifiable[name] = (
                f"{spec.engine} keeps it in a layout of its own"
                if declared
                else f"the layout of {spec.family} in {spec.engine} has no row for it"
            )
    return LiveCheck(
        expected.tp_rank,
        matched,
        tuple(name for name in both if name not in set(matched)),
        tuple(name for name in known if name not in live),
        unexpected,
        unverifiable,
    )
