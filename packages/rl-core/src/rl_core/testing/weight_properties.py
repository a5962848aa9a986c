"""Ten properties of weight synchronisation, whatever engine, transport, size or model.

`WeightPropertyContract` wants a fixture `case`: a `CarriedCase`, that is a replica that runs and a
carrier that feeds it. Engine and carrier are independent: the same replica is taken through the
contract with one carrier after the other.
"""

from typing import ClassVar

import pytest
import torch

from rl_core.errors import StaleVersionError, VerificationError
from rl_core.testing.carried_case import CarriedCase, is_ours
from rl_core.testing.carriers import FAULT_S, OVER_S, Route
from rl_core.testing.contract import SKIP_PREFIX, Contract
from rl_core.testing.rollout_case import RolloutCapability
from rl_core.testing.rollout_failure_contract import FailureContract
from rl_core.testing.rollout_live_contract import assert_named, expectations, live_digests
from rl_core.testing.rollout_serving_contract import ServingContract
from rl_core.testing.rollout_sync_contract import SyncContract, ordered
from rl_core.testing.weight_set import WeightSet
from rl_core.versions import PolicyVersion

ORDERS = ("backward", "shuffled", "spread", "forward")


class _Syncing(SyncContract):
    """Tests that are properties."""


class _Serving(ServingContract):
    """Tests that are properties."""


class _Failing(FailureContract):
    """Tests that are properties."""


class WeightPropertyContract(Contract, contract=True):
    """The ten properties; each is one test.

    Attributes:
        names: of the tests, by number of the property.
    """

    names: ClassVar = {
        1: "test_digests_do_not_depend_on_the_way",
        2: "test_syncs_without_a_step_change_nothing",
        3: "test_a_warm_engine_equals_a_cold_one",
        4: "test_syncing_twice_equals_syncing_once",
        5: "test_what_was_not_sent_stays_as_it_was",
        6: "test_no_poison_is_left",
        7: "test_the_digest_changes_with_the_policy",
        8: "test_tokens_carry_the_version_that_made_them",
        9: "test_every_failure_ends_in_a_named_state",
        10: "test_versions_never_go_back",
    }

    def test_digests_do_not_depend_on_the_way(self, case: CarriedCase) -> None:
        """Transport, bucket size, order of the tensors, number of ranks on both sides."""
        sets = (case.given.weights_a, case.given.weights_b)
        try:
            for number, (route, order) in enumerate(zip(case.carrier.ways, ORDERS, strict=True)):
                case.route = route
                weights = sets[number % 2]
                case.sync(ordered(weights, order))
                case.assert_holds(weights)
        finally:
            case.route = Route()

    def test_syncs_without_a_step_change_nothing(self, case: CarriedCase) -> None:
        """Neither what is held, nor what is published, nor what is answered."""
        case.sync(case.given.weights_a)
        published, held = case.published, live_digests(case)
        for _ in range(3):
            case.sync(case.given.weights_a)
            assert case.published == published
            assert live_digests(case) == held
        case.assert_same(case.fingerprint(), case.base_a)

    def test_a_warm_engine_equals_a_cold_one(self, case: CarriedCase) -> None:
        """Digests are those of the engine's own start; answers those of another program."""
        self.need(RolloutCapability.COLD_START)
        cold = case.facts.cold
        assert cold is not None, "give `cold`, or declare that COLD_START is lacking"
        case.sync(case.given.weights_a)
        case.fingerprint()
        case.sync(cold.weights)
        assert live_digests(case) == cold.digests
        cold.agree(case.fingerprint())

    def test_syncing_twice_equals_syncing_once(self, case: CarriedCase) -> None:
        """Held and answered."""
        case.sync(case.given.weights_a)
        case.sync(case.given.weights_b)
        once = live_digests(case)
        _Syncing().test_syncing_twice_equals_once(case)
        assert live_digests(case) == once

    def test_what_was_not_sent_stays_as_it_was(self, case: CarriedCase) -> None:
        """Buffers, and tensors that did not change, by a sync; what an update lacks, by that."""
        first, second = case.given.weights_a, case.given.weights_b
        case.sync(first)
        case.fingerprint()
        before, expected = live_digests(case), expectations(case, first)
        for name in _some_names(case):
            case.sync(first.changed({name: second.tensors[name]}))
            assert_named(case, expected, {name})
            for rank, (old, now) in enumerate(zip(before, live_digests(case), strict=True)):
                known = expected[rank].tensors
                given = [key for key in old if key not in known or not known[key].sources]
                moved = [key for key in given if not _derived(case, key) and old[key] != now[key]]
                assert not moved, f"rank {rank}: {moved} changed, and came from nobody"
        case.sync(first)
        name = list(first.tensors)[-1]
        short = second.without(name)
        case.rejected(short.entries(), short.manifest(case.version()))
        case.assert_fenced(name)
        for held, old, now in zip(expected, before, live_digests(case), strict=True):
            alone = [key for key, item in held.tensors.items() if set(item.sources) == {name}]
            assert [old[key] for key in alone] == [now[key] for key in alone]
        case.assert_repaired_by_sync()

    def test_no_poison_is_left(self, case: CarriedCase) -> None:
        """NaN in the engine is gone after one sync; NaN in a version stops it."""
        weights = case.given.weights_b
        case.sync(case.given.weights_a)
        before = live_digests(case)
        case.facts.poison()
        assert live_digests(case) != before, "the poison was not taken"
        case.sync(weights)
        case.assert_holds(weights)
        case.assert_same(case.fingerprint(), case.base_b)
        with pytest.raises(VerificationError):
            case.update(case.given.weights_a.filled(float("nan")))
        case.assert_fenced()
        case.sync(weights)
        case.assert_holds(weights)
        case.assert_same(case.fingerprint(), case.base_b)

    def test_the_digest_changes_with_the_policy(self, case: CarriedCase) -> None:
        """One bit of one tensor is another policy; nothing is the same one."""
        first = case.given.weights_a
        case.sync(first)
        published, held = case.published, live_digests(case)
        assert published is not None
        for name in _some_names(case):
            case.sync(one_bit_changed(first, name))
            assert case.published != published, f"a bit of {name} changed, the digest did not"
            assert live_digests(case) != held
            case.sync(first)
            assert case.published == published, "the digest changed, the policy did not"
            assert live_digests(case) == held

    def test_tokens_carry_the_version_that_made_them(self, case: CarriedCase) -> None:
        """Also while updates run into requests; no cached prefix outlives its version."""
        serving = _Serving()
        serving.test_versions_are_stamped(case)
        serving.test_commit_flushes_the_prefix_cache(case)
        serving.test_no_answer_mixes_versions(case)
        _Failing().test_nothing_is_served_between_load_and_commit(case)

    def test_every_failure_ends_in_a_named_state(self, case: CarriedCase) -> None:
        """Within its deadline, on every side; the next sync repairs it."""
        for harm in case.carrier.harms:
            if harm == "a rank is never fed" and len(case.given.adapters) == 1:
                continue
            served = case.sync(case.given.weights_a)
            ending = case.harmed(harm)
            assert ending.errors, f"{harm}: nobody noticed"
            assert all(is_ours(error) for error in ending.errors), (harm, ending.errors)
            assert ending.seconds <= FAULT_S + OVER_S, (harm, ending.seconds)
            case.assert_named_state(served)
            case.assert_repaired_by_sync()

    def test_versions_never_go_back(self, case: CarriedCase) -> None:
        """Old, repeated, of an earlier run; and of the run that died, however late and high."""
        if case.facts.versions is None:
            pytest.skip(f"{SKIP_PREFIX}a restart would make versions of other tests stale")
        _Failing().test_old_and_repeated_versions_are_refused(case)
        old = case.sync(case.given.weights_a)
        first = case.facts.versions.restart()
        case.update(case.given.weights_b, manifest=case.given.weights_b.manifest(first))
        case.first.commit(first, case.given.timeout_s)
        assert first > old
        late = case.given.weights_a.manifest(PolicyVersion(old.epoch, first.step + 5))
        for error in case.rejected(case.given.weights_a.entries(), late):
            assert isinstance(error, StaleVersionError), repr(error)
        assert case.first.committed_version(case.given.timeout_s) == first
        case.assert_same(case.fingerprint(), case.base_b)


def one_bit_changed(weights: WeightSet, name: str) -> WeightSet:
    """A copy with the lowest bit of the first element of a tensor flipped."""
    tensor = weights.tensors[name].clone()
    tensor.view(-1)[:1].view(torch.uint8)[0] ^= 1
    return weights.changed({name: tensor})


def _some_names(case: CarriedCase) -> list[str]:
    """A tensor that is a part of a fused one at run time, and one that is not."""
    held = expectations(case, case.given.weights_a)[0].tensors.values()
    fused = next(item.sources[-1] for item in held if len(item.sources) > 1)
    alone = [item.sources[0] for item in held if len(item.sources) == 1]
    return [fused, alone[-1]]


def _derived(case: CarriedCase, name: str) -> bool:
    """Whether the engine says that it makes this of its weights in a way of its own."""
    spec = case.given.layout
    return spec is not None and not spec.covers(name)
