"""A replica that gets its weights by a carrier, and what is known of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import MiniRLError, VerificationError
from rl_core.interfaces import LeasedTensor, LoadReport
from rl_core.metadata import Manifest
from rl_core.testing.carriers import FAULT_S, Carrier, Ending, Route
from rl_core.testing.rollout_case import Fingerprint, RolloutCase, RolloutUnderTest
from rl_core.testing.rollout_live_contract import checks, clean, live_digests
from rl_core.testing.weight_set import WeightSet
from rl_core.versions import PolicyVersion, VersionStore


class Versions:
    """Versions of a run, as its controller hands them out: recorded before anybody hears of them.

    One for all carriers of a replica.
    """

    def __init__(self, path: Path) -> None:
        """Recorded in the file `path`; what is there is gone on from."""
        self._path = path
        self._store = VersionStore(path)

    def next(self) -> PolicyVersion:
        """A version newer than all before."""
        current = self._store.current
        version = PolicyVersion(1, 0) if current is None else current.next_step()
        self._store.record(version)
        return version

    def restart(self) -> PolicyVersion:
        """As if the controller had died and the run was resumed: the first version of the new run.

        Nothing but the file is known of the old one.
        """
        self._store = VersionStore(self._path)
        current = self._store.current
        assert current is not None, "no version was recorded"
        self._store.record(current.next_epoch())
        return current.next_epoch()


@dataclass(frozen=True)
class StartState:
    """An engine as it was after it had read a model directory, before its first sync.

    Attributes:
        weights: of the directory.
        digests: of what its ranks held.
        agree: fails the test if answers are not those of another program on these weights.
    """

    weights: WeightSet
    digests: list[dict[str, str]]
    agree: Callable[[Fingerprint], None]


@dataclass(frozen=True)
class EngineFacts:
    """What the tests know of a replica, whatever way its weights came.

    Attributes:
        poison: overwrites all weights in the engine with NaN.
        cold: how it was when it had just started; None if it did not read its weights then.
        versions: of the run; None: they are numbered by the replica's own steps.
        held: live digests by digest of the weights that brought them, as first seen.
    """

    poison: Callable[[], object]
    cold: StartState | None
    versions: Versions | None
    held: dict[str, list[dict[str, str]]]


class CarriedCase(RolloutCase):
    """One replica, fed by one carrier.

    Attributes:
        carrier: takes the weights there.
        facts: about the engine.
        route: by which they go.
        published: digest of digests that the last update ended with; None if there was none.
        patience: what deadlines are multiplied by (other than 1 to break it).
    """

    patience = 1.0

    def __init__(self, rollout: RolloutUnderTest, carrier: Carrier, facts: EngineFacts) -> None:
        self.carrier = carrier
        self.facts = facts
        self.route = Route()
        self.published: str | None = None
        super().__init__(rollout)

    def version(self) -> PolicyVersion:
        """A version newer than all before."""
        versions = self.facts.versions
        return super().version() if versions is None else versions.next()

    def update(
        self, weights: WeightSet, *, per_bucket: int | None = 3, manifest: Manifest | None = None
    ) -> list[LoadReport]:
        """Load `weights` into all ranks by the carrier, without commit."""
        del per_bucket  # the route says how they travel
        manifest = manifest or weights.manifest(self.version())
        outcomes = self.carrier.carry(self, weights, manifest, self.route)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            # Ranks that only heard of a failure say less about it.
            raise next(
                (error for error in errors if isinstance(error, VerificationError)), errors[0]
            )
        reports = [outcome for outcome in outcomes if isinstance(outcome, LoadReport)]
        [self.published] = {report.weights_digest for report in reports}
        return reports

    def rejected(self, entries: Sequence[LeasedTensor], manifest: Manifest) -> list[BaseException]:
        """The errors of an update that must fail, from every rank that has one."""
        weights = WeightSet({entry.meta.name: entry.tensor for entry in entries})
        # Refused before anything is touched, so that no memory must be handed over before it.
        outcomes = self.carrier.carry(self, weights, manifest, Route(hands_memory=False))
        accepted = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert not accepted, f"a wrong update was accepted: {accepted}"
        return [outcome for outcome in outcomes if isinstance(outcome, BaseException)]

    def harmed(self, harm: str) -> Ending:
        """How a sync to B ends to which `harm` is done."""
        weights = self.given.weights_b
        manifest = weights.manifest(self.version())
        return self.carrier.harmed(self, weights, manifest, harm, self.patience * FAULT_S)

    def assert_holds(self, weights: WeightSet) -> None:
        """Every rank holds exactly `weights`, bit for bit what they were the first time.

        The first time is with another carrier, another bucket size, or none at all: what an engine
        read when it started is known here, too.
        """
        for check in checks(self, weights):
            assert clean(self, check), f"{self.carrier.name}: {check}"
            assert check.matched
        found = live_digests(self)
        known = self.facts.held.setdefault(weights.weights_digest, found)
        for rank, (mine, theirs) in enumerate(zip(found, known, strict=True)):
            differ = [name for name in mine.keys() | theirs if mine.get(name) != theirs.get(name)]
            assert not differ, f"{self.carrier.name}: rank {rank} does not hold {differ} as before"

    def assert_named_state(self, served: PolicyVersion) -> None:
        """Either `served` is served as if nothing had been, or nothing is, with a reason."""
        if self.first.committed_version(self.given.timeout_s) is None:
            self.assert_fenced()
            return
        assert self.first.committed_version(self.given.timeout_s) == served
        self.assert_same(self.fingerprint(), self.base_a)


def is_ours(error: object) -> bool:
    """Whether it is one of `rl_core.errors`."""
    return isinstance(error, MiniRLError)
