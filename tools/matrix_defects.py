"""Defects, one for each property, that turn it red: cases that are wrong in one way each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from rl_core.interfaces import LeasedTensor, LoadReport
from rl_core.metadata import Manifest
from rl_core.testing.carried_case import CarriedCase, EngineFacts
from rl_core.testing.carriers import Carrier
from rl_core.testing.rollout_case import RolloutUnderTest
from rl_core.testing.rollout_live_contract import expectations, live_digests
from rl_core.testing.weight_set import WeightSet
from rl_core.trajectory import Completion


class Defect(CarriedCase):
    """A case that is wrong in one way.

    Attributes:
        number: of the property that must notice it.
    """

    number: ClassVar[int]

    def update(self, weights: WeightSet, **options: Any) -> list[LoadReport]:
        """Load what `_sent` says, then do the harm."""
        reports = super().update(self._sent(weights), **options)
        self._harm(weights)
        return reports

    def _sent(self, weights: WeightSet) -> WeightSet:
        """What is sent in place of `weights`."""
        return weights

    def _harm(self, weights: WeightSet) -> None:
        """Done to the engine once `weights` are loaded."""

    def undo(self) -> None:
        """Take back what no sync takes back."""

    def flip(self, name: str) -> None:
        """Change one bit of a live tensor of the first rank, or change it back."""
        assert self.given.flip is not None
        self.given.flip(0, name, 0.0)

    def live_names(self, *, buffers: bool) -> list[str]:
        """Live tensors that come from weights, or that do not."""
        held = expectations(self, self.given.weights_a)[0].tensors
        return [name for name, item in held.items() if buffers == (not item.sources)]


class BucketEdge(Defect):
    """Whatever is cut into other buckets than usual loses a bit at an edge."""

    number = 1

    def _harm(self, weights: WeightSet) -> None:
        usual = type(self.route)()
        if self.route != usual:
            self.flip(self.live_names(buffers=False)[0])


class Drift(Defect):
    """Every sync multiplies what the last one left, as a merge in place does."""

    number = 2
    _gain = 1.0

    def _sent(self, weights: WeightSet) -> WeightSet:
        self._gain *= 1.01
        name = _matrix(weights)
        return weights.changed({name: weights.tensors[name] * self._gain})


class LeftBehind(Defect):
    """A tensor is always that of the sync before."""

    number = 3
    _before: WeightSet | None = None

    def _sent(self, weights: WeightSet) -> WeightSet:
        before, self._before = self._before or weights, weights
        name = _matrix(weights)
        return weights.changed({name: before.tensors[name]})


class SecondLoadHarms(Defect):
    """Loading what is already there breaks it."""

    number = 4
    _last = ""

    def _harm(self, weights: WeightSet) -> None:
        last, self._last = self._last, weights.weights_digest
        if last == self._last:
            self.flip(self.live_names(buffers=False)[-1])


class BufferTouched(Defect):
    """A load writes one element further than it should, into what it was not sent."""

    number = 5
    _flipped = 0

    def _victim(self) -> str:
        buffers = [name for name in self.live_names(buffers=True) if name in live_digests(self)[0]]
        return (buffers or self.live_names(buffers=False))[0]

    def _harm(self, weights: WeightSet) -> None:
        del weights
        self.flip(self._victim())
        self._flipped += 1

    def undo(self) -> None:
        """Flip the bit back: buffers are not synced."""
        if self._flipped % 2 and self.live_names(buffers=True):
            self.flip(self._victim())


class PoisonLeft(Defect):
    """A poisoned engine takes a sync, and computes with what it had."""

    number = 6
    _poisoned = False

    def __init__(self, rollout: RolloutUnderTest, carrier: Carrier, facts: EngineFacts) -> None:
        self._poison = facts.poison
        super().__init__(rollout, carrier, replace(facts, poison=self._poisoning))

    def _poisoning(self) -> None:
        self._poison()
        self._poisoned = True

    def _harm(self, weights: WeightSet) -> None:
        del weights
        if self._poisoned:
            self._poison()


class DigestOfBefore(Defect):
    """What is published is the digest that was computed first."""

    number = 7
    _first: str | None = None

    def _harm(self, weights: WeightSet) -> None:
        del weights
        self._first = self.published = self._first or self.published


class LateLabel(Defect):
    """Tokens are labelled with a version that somebody remembers, not the one that made them."""

    number = 8

    def generate(self, requests: Sequence[Any]) -> list[Completion]:
        """With every span under the version of the first answer."""
        completions = super().generate(requests)
        first = completions[0].version_spans[0].version
        self._remembered = getattr(self, "_remembered", first)
        return [
            msgspec.structs.replace(
                item,
                version_spans=[
                    msgspec.structs.replace(span, version=self._remembered)
                    for span in item.version_spans
                ],
            )
            for item in completions
        ]


class DeadlineIgnored(Defect):
    """Deadlines are taken for ten times what they are."""

    number = 9
    patience = 10.0


class OldVersionsRenamed(Defect):
    """A version that is too old is given a number that is not."""

    number = 10

    def rejected(self, entries: Sequence[LeasedTensor], manifest: Manifest) -> list[BaseException]:
        """Under another version."""
        renamed = msgspec.structs.replace(manifest, version=self.version())
        return super().rejected(entries, renamed)


DEFECTS: dict[str, type[Defect]] = {
    "bucket_edge": BucketEdge,
    "drift": Drift,
    "left_behind": LeftBehind,
    "second_load_harms": SecondLoadHarms,
    "buffer_touched": BufferTouched,
    "poison_left": PoisonLeft,
    "digest_of_before": DigestOfBefore,
    "late_label": LateLabel,
    "deadline_ignored": DeadlineIgnored,
    "old_versions_renamed": OldVersionsRenamed,
}


def _matrix(weights: WeightSet) -> str:
    """A matrix in the middle of the stream."""
    names = [name for name, tensor in weights.tensors.items() if tensor.dim() == 2]
    return sorted(names)[len(names) // 2]
