"""Weights arrive, all of them, in the right place, whatever way they travel."""

import random
from pathlib import Path

import pytest

from rl_core.deadlines import Deadline
from rl_core.errors import VerificationError
from rl_core.interfaces import LoadReport
from rl_core.testing.contract import Contract
from rl_core.testing.rollout_case import ColdStart, RolloutCapability, RolloutCase
from rl_core.testing.rollout_live_contract import live_digests
from rl_core.testing.weight_set import WeightSet, leases


class SyncContract(Contract, contract=True):
    """After an update the engine is as if it had been started on the new weights."""

    def test_warm_update_equals_cold_start(self, case: RolloutCase) -> None:
        """An engine taken to new weights answers like one that never held others.

        The weights are ones that the replica never held, so that nothing can be right by chance
        because it was left behind by an earlier update.
        """
        self.need(RolloutCapability.COLD_START)
        if case.given.cold_start is not None:
            _assert_like_its_start(case, case.given.cold_start)
            return
        assert case.given.cold is not None, "give `cold`, or declare that COLD_START is lacking"
        fresh = case.given.weights_a.blended(case.given.weights_b)
        case.sync(case.given.weights_a)
        case.fingerprint()
        case.sync(fresh)
        with case.given.cold(fresh) as adapters:
            case.assert_same(case.fingerprint(), case.fingerprint(adapters))

    def test_update_changes_the_answers(self, case: RolloutCase) -> None:
        """A and B differ in tokens, so that the other tests mean something."""
        assert case.base_a != case.base_b
        case.sync(case.given.weights_b)
        case.assert_same(case.fingerprint(), case.base_b)
        case.sync(case.given.weights_a)
        case.assert_same(case.fingerprint(), case.base_a)

    @pytest.mark.parametrize("order", ["forward", "backward", "shuffled", "spread"])
    @pytest.mark.parametrize("per_bucket", [1, 2, 7, None])
    def test_order_and_bucket_size_do_not_matter(
        self, case: RolloutCase, order: str, per_bucket: int | None
    ) -> None:
        """From one tensor a bucket to all in one; fused parts near and far from each other."""
        case.sync(case.given.weights_a)
        case.sync(_ordered(case.given.weights_b, order), per_bucket=per_bucket)
        case.assert_same(case.fingerprint(), case.base_b)

    def test_every_single_tensor_arrives(self, case: RolloutCase) -> None:
        """A set that differs from A in one tensor gives other log-probabilities than A."""
        deaf = []
        for name in case.given.weights_a.tensors.keys() - case.given.may_be_deaf:
            case.sync(case.given.weights_a.changed({name: case.given.weights_b.tensors[name]}))
            if case.fingerprint() == case.base_a:
                deaf.append(name)
        assert not deaf, f"changing these tensors changes no answer: {deaf}"

    def test_syncing_twice_equals_once(self, case: RolloutCase) -> None:
        """The second load of the same weights is neither a no-op nor harmful."""
        case.sync(case.given.weights_b)
        case.sync(case.given.weights_b)
        case.assert_same(case.fingerprint(), case.base_b)

    def test_syncs_without_change_change_nothing(self, case: RolloutCase) -> None:
        """No drift over several syncs of the same weights."""
        for _ in range(5):
            case.sync(case.given.weights_a)
            case.assert_same(case.fingerprint(), case.base_a)

    def test_no_poison_is_left(self, case: RolloutCase) -> None:
        """After NaN everywhere, loaded or refused, one full sync repairs everything."""
        case.sync(case.given.weights_a)
        poison = case.given.weights_a.filled(float("nan"))
        manifest, entries = poison.manifest(case.version()), poison.entries()
        outcomes = case.outcomes(lambda: leases(entries, 3), manifest)
        if not all(isinstance(outcome, LoadReport) for outcome in outcomes):
            assert any(isinstance(outcome, VerificationError) for outcome in outcomes), outcomes
        case.first.fence("poisoned by a test", case.given.timeout_s)
        case.assert_fenced()
        case.sync(case.given.weights_b)
        case.assert_same(case.fingerprint(), case.base_b)

    def test_report_accounts_for_everything(self, case: RolloutCase) -> None:
        """Counts, bytes and recomputed digests, on every rank."""
        weights = case.given.weights_b
        manifest = weights.manifest(case.version())
        for report in case.update(weights, manifest=manifest):
            assert report.version == manifest.version
            assert report.tensors == len(manifest.tensors)
            assert report.nbytes == manifest.nbytes
            assert report.matched == len(manifest.tensors)
            assert report.weights_digest == weights.weights_digest
        case.first.commit(manifest.version, case.given.timeout_s)

    def test_directory_equals_stream(self, case: RolloutCase, tmp_path: Path) -> None:
        """Weights loaded from a directory answer like streamed ones."""
        self.need(RolloutCapability.DISK)
        assert case.given.save is not None, "give `save`, or declare that DISK is lacking"
        case.sync(case.given.weights_a)
        case.given.save(case.given.weights_b, tmp_path)
        manifest = case.given.weights_b.manifest(case.version())
        deadline = Deadline.after(case.given.timeout_s)
        report = case.first.update_weights_from_disk(tmp_path, manifest, deadline)
        assert report.version == manifest.version
        case.first.commit(manifest.version, case.given.timeout_s)
        case.assert_same(case.fingerprint(), case.base_b)
        case.assert_repaired_by_sync()


def _assert_like_its_start(case: RolloutCase, cold: ColdStart) -> None:
    """Taken back to what it was started on, from weights that differ in every tensor."""
    for weights in (case.given.weights_b, case.given.weights_a):
        case.sync(weights)
        assert case.fingerprint() != cold.answers, "the start's weights answer like others"
    case.sync(cold.weights)
    case.assert_same(case.fingerprint(), cold.answers)
    if cold.digests is not None:
        assert live_digests(case) == cold.digests


def _ordered(weights: WeightSet, order: str) -> WeightSet:
    names = list(weights.tensors)
    if order == "backward":
        names.reverse()
    elif order == "shuffled":
        random.Random(0).shuffle(names)
    elif order == "spread":
        names = [name for start in range(5) for name in names[start::5]]
    return weights.ordered(names)
