"""Memory is handed back and forth as in fused mode, and nothing is served without weights."""

import pytest

from rl_core.errors import LifecycleError, RolloutError
from rl_core.testing.contract import Contract
from rl_core.testing.rollout_case import GREEDY, RolloutCapability, RolloutCase
from rl_core.trajectory import SamplingParams


class MemoryContract(Contract, contract=True):
    """Release, resume, update, serve."""

    def test_released_resumed_updated_replica_serves(self, case: RolloutCase) -> None:
        """The order of a fused sync; twice, since the first time is often the only good one."""
        for weights, base in [
            (case.given.weights_b, case.base_b),
            (case.given.weights_a, case.base_a),
        ]:
            freed = case.first.release(["kv_cache", "weights"], case.given.timeout_s)
            assert set(freed) == {"kv_cache", "weights"}
            assert all(value >= 0 for value in freed.values())
            case.first.resume(["weights"], case.given.timeout_s)
            manifest = weights.manifest(case.version())
            case.update(weights, manifest=manifest)
            case.first.resume(["kv_cache"], case.given.timeout_s)
            case.first.commit(manifest.version, case.given.timeout_s)
            case.assert_same(case.fingerprint(), base)

    @pytest.mark.parametrize("tag", ["kv_cache", "weights"])
    def test_memory_is_freed(self, case: RolloutCase, tag: str) -> None:
        """A positive number of bytes; the second release frees nothing more."""
        self.need(_FREES[tag])
        case.sync(case.given.weights_a)
        assert case.first.release([tag], case.given.timeout_s)[tag] > 0
        assert case.first.release([tag], case.given.timeout_s)[tag] == 0
        case.first.resume([tag], case.given.timeout_s)
        case.assert_repaired_by_sync()

    def test_released_kv_memory_leaves_the_process(self, case: RolloutCase) -> None:
        """What the engine says it freed is gone from its processes, and does not come back unused.

        Whatever the engine itself counts, the operating system is asked.
        """
        self.need(RolloutCapability.FREES_KV_CACHE)
        resident = case.given.resident
        assert resident is not None, "give `resident`"
        case.sync(case.given.weights_a)
        case.generate(case.requests(ONE_TOKEN, case.given.filling))
        filled = resident()
        freed = case.first.release(["kv_cache"], case.given.timeout_s)["kv_cache"]
        assert freed >= SEEN_BYTES, "too little to be seen from outside; give the engine more"
        assert filled - resident() > freed / 2, f"of {freed} freed bytes most are still resident"
        case.first.resume(["kv_cache"], case.given.timeout_s)
        assert filled - resident() > freed / 2, "resumed memory is resident before it is used"
        case.assert_repaired_by_sync()

    @pytest.mark.parametrize("tag", ["kv_cache", "weights"])
    def test_nothing_is_served_from_released_memory(self, case: RolloutCase, tag: str) -> None:
        """Requests are refused, not hung and not answered with garbage."""
        self.need(_FREES[tag])
        case.sync(case.given.weights_a)
        case.first.release([tag], case.given.timeout_s)
        with pytest.raises(RolloutError):
            case.first.generate(case.requests(GREEDY), case.given.timeout_s)
        case.first.resume([tag], case.given.timeout_s)
        case.assert_repaired_by_sync()

    def test_resumed_weights_need_a_sync(self, case: RolloutCase) -> None:
        """Weights come back empty: requests are refused until the next commit."""
        self.need(RolloutCapability.FREES_WEIGHTS)
        case.sync(case.given.weights_a)
        case.first.release(["weights"], case.given.timeout_s)
        case.first.resume(["weights"], case.given.timeout_s)
        case.assert_fenced()
        case.assert_repaired_by_sync()

    def test_weights_released_before_their_commit_are_not_served(self, case: RolloutCase) -> None:
        """What was loaded is gone with the memory: there is nothing left to commit."""
        self.need(RolloutCapability.FREES_WEIGHTS)
        case.sync(case.given.weights_a)
        manifest = case.given.weights_b.manifest(case.version())
        case.update(case.given.weights_b, manifest=manifest)
        case.first.release(["weights"], case.given.timeout_s)
        case.first.resume(["weights"], case.given.timeout_s)
        with pytest.raises(LifecycleError):
            case.first.commit(manifest.version, case.given.timeout_s)
        case.assert_fenced()
        case.assert_repaired_by_sync()

    def test_resumed_kv_cache_gives_right_answers_or_none(self, case: RolloutCase) -> None:
        """With the weights still there, what is answered is right."""
        case.sync(case.given.weights_a)
        case.fingerprint()
        case.first.release(["kv_cache"], case.given.timeout_s)
        case.first.resume(["kv_cache"], case.given.timeout_s)
        try:
            found = case.fingerprint()
        except RolloutError:
            found = case.base_a
        case.assert_same(found, case.base_a)
        case.assert_repaired_by_sync()

    def test_unknown_memory_tag_is_refused(self, case: RolloutCase) -> None:
        """A typo frees nothing silently."""
        case.sync(case.given.weights_a)
        with pytest.raises(RolloutError, match="kv_cach"):
            case.first.release(["kv_cach"], case.given.timeout_s)
        case.assert_repaired_by_sync()


ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
SEEN_BYTES = 32 << 20
"""From this size on, an allocation comes from the operating system and goes back to it."""

_FREES = {
    "kv_cache": RolloutCapability.FREES_KV_CACHE,
    "weights": RolloutCapability.FREES_WEIGHTS,
}
