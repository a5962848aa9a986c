"""What is sampled, from which version, with which log-probabilities."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import wait
from itertools import combinations
from typing import TYPE_CHECKING

import pytest

from rl_core.errors import RolloutError
from rl_core.interfaces import PauseMode
from rl_core.testing.contract import Contract
from rl_core.testing.rollout_case import (
    GREEDY,
    Fingerprint,
    RolloutCapability,
    RolloutCase,
    check_completion,
)
from rl_core.trajectory import Completion, GenerateRequest, SamplingParams, VersionSpan
from rl_core.versions import PolicyVersion

if TYPE_CHECKING:
    from concurrent.futures import Future

DELAYS_S = (None, 0.03, 0.1, 0.01, 0.3, 1.0, 3.0)
"""How long requests run before they are paused, tried until one is caught in the middle; see
`RolloutCase.let_run`."""

QUEUED_S = 0.5
"""How long a request that came in a pause must stay unanswered."""


class ServingContract(Contract, contract=True):
    """Every token is traceable: version, log-probability, seed, finish reason."""

    def test_commit_flushes_the_prefix_cache(self, case: RolloutCase) -> None:
        """The same prompts, cached under A, are answered by B alone."""
        self.need(RolloutCapability.PREFIX_CACHE)
        case.sync(case.given.weights_a)
        case.assert_same(case.fingerprint(), case.base_a)
        case.assert_same(case.fingerprint(), case.base_a)
        case.sync(case.given.weights_b)
        case.assert_same(case.fingerprint(), case.base_b)

    def test_clear_kv_cache_changes_no_answer(self, case: RolloutCase) -> None:
        """It is confirmed, and harmless."""
        case.sync(case.given.weights_a)
        case.fingerprint()
        case.first.clear_kv_cache(case.given.timeout_s)
        case.assert_same(case.fingerprint(), case.base_a)

    def test_versions_are_stamped(self, case: RolloutCase) -> None:
        """Tokens carry the version that is committed when they are sampled."""
        for weights in (case.given.weights_a, case.given.weights_b):
            version = case.sync(weights)
            assert case.first.committed_version(case.given.timeout_s) == version
            for completion in case.generate(case.requests(GREEDY)):
                assert completion.version_spans == [VersionSpan(version, 0, GREEDY.max_tokens)]

    def test_finish_reasons(self, case: RolloutCase) -> None:
        """`length` fills the limit; `stop` ends with the end token, which is included."""
        case.sync(case.given.weights_a)
        for completion in case.generate(case.requests(GREEDY)):
            assert completion.finish_reason == "length"
            assert len(completion.token_ids) == GREEDY.max_tokens
        sampled = case.generate(_seeded(case, 64, max_tokens=16))
        stopped = [item for item in sampled if item.finish_reason == "stop"]
        for completion in sampled:
            assert completion.finish_reason in {"stop", "length"}
            if completion.finish_reason == "length":
                assert len(completion.token_ids) == 16
        if case.given.eos_id is not None:
            assert stopped, "no sample ended by itself; give weights that sample eos_id"
            assert {item.token_ids[-1] for item in stopped} == {case.given.eos_id}

    def test_seeds_reproduce(self, case: RolloutCase) -> None:
        """The same seed gives the same tokens in any order and batch; others differ."""
        self.need(RolloutCapability.SEEDS)
        case.sync(case.given.weights_a)
        requests = _seeded(case, 6, max_tokens=12)
        together = case.generate(requests)
        backward = case.generate(requests[::-1])[::-1]
        alone = [case.generate([request])[0] for request in requests]
        for one, two, three in zip(together, backward, alone, strict=True):
            assert one.token_ids == two.token_ids == three.token_ids
            assert one.log_probs == pytest.approx(two.log_probs, abs=case.given.tolerance)
        assert len({tuple(item.token_ids) for item in together}) > 1

    def test_one_request_gives_several_samples(self, case: RolloutCase) -> None:
        """Each with an id, tokens, log-probabilities and spans of its own, in order."""
        version = case.sync(case.given.weights_a)
        prompts = case.given.prompts[:2]
        several = SamplingParams(max_tokens=12, seed=7, ignore_eos=True, n=3)
        requests = case.requests(several, prompts)
        found = case.first.generate(requests, case.given.timeout_s)
        alone = [sample for request in requests for sample in request.samples()]
        assert [item.request_id for item in found] == [sample.request_id for sample in alone]
        assert len({item.request_id for item in found}) == several.n * len(prompts)
        for completion in found:
            check_completion(completion)
            assert completion.version_spans == [VersionSpan(version, 0, several.max_tokens)]
            assert completion.finish_reason == "length"
        if RolloutCapability.SEEDS in self.lacks:
            return
        for first in range(0, len(found), several.n):
            tokens = {tuple(item.token_ids) for item in found[first : first + several.n]}
            assert len(tokens) == several.n, "samples of one request are the same"
        for one, other in zip(found, case.generate(alone), strict=True):
            assert one.token_ids == other.token_ids
            assert one.log_probs == pytest.approx(other.log_probs, abs=case.given.tolerance)

    def test_log_probs_are_of_the_sampled_distribution(self, case: RolloutCase) -> None:
        """At half the temperature, differences of log-probabilities are twice as large."""
        case.sync(case.given.weights_a)
        tolerance, spread = 10 * case.given.tolerance, 0.0
        for prompt in case.given.prompts:
            warm, cool = _first_tokens(case, prompt, 1.0), _first_tokens(case, prompt, 0.5)
            for one, two in combinations(warm.keys() & cool.keys(), 2):
                difference = warm[one] - warm[two]
                assert cool[one] - cool[two] == pytest.approx(2 * difference, abs=tolerance)
                spread = max(spread, abs(difference))
        assert spread > 100 * case.given.tolerance, "no two tokens to compare; see `weights_a`"

    def test_pause_queues_new_requests(self, case: RolloutCase) -> None:
        """They are answered after `continue_`, none before."""
        mode = self.any_pause_mode()
        case.sync(case.given.weights_a)
        case.first.pause(mode, case.given.timeout_s)
        waiting = case.in_background(case.fingerprint)
        # An engine that ignores the pause has this long to give itself away.
        assert not wait([waiting], QUEUED_S).done, "a request was answered during a pause"
        case.first.continue_(case.given.timeout_s)
        case.assert_same(waiting.result(case.given.timeout_s), case.base_a)

    def test_pause_abort_returns_what_there_is(self, case: RolloutCase) -> None:
        """Partial completions of the old version, marked `abort`."""
        self.need(RolloutCapability.PAUSE_ABORT)
        for delay_s in DELAYS_S:
            version, completions = self._paused_update(case, PauseMode.ABORT, delay_s)
            begun = [item for item in completions if _began_under(item, version)]
            for item in begun:
                assert len(item.version_spans) == 1, "an aborted request went on"
                _assert_prefix(item, case.base_a)
            if any(item.finish_reason == "abort" for item in begun):
                return
        pytest.fail("no request was caught in the middle; give a larger `long_tokens`")

    def test_pause_wait_lets_requests_finish(self, case: RolloutCase) -> None:
        """Requests in flight are finished by the version that began them."""
        self.need(RolloutCapability.PAUSE_WAIT)
        for delay_s in DELAYS_S:
            version, completions = self._paused_update(case, PauseMode.WAIT, delay_s)
            assert {item.finish_reason for item in completions} <= {"length"}
            assert all(len(item.version_spans) == 1 for item in completions)
            if any(_began_under(item, version) for item in completions):
                return
        pytest.fail("no request had begun before the pause")

    def test_pause_keep_records_both_versions(self, case: RolloutCase) -> None:
        """A kept request goes on under the new version, and says from which token on."""
        self.need(RolloutCapability.PAUSE_KEEP)
        self._assert_recomputed(case, self._caught(case, PauseMode.KEEP))

    def test_pause_in_place_records_both_versions(self, case: RolloutCase) -> None:
        """A request keeps the KV that it has, says which version sampled what, and keeps it alone.

        Others with the same prompt are answered by the new version only (`_paused_update` asks).
        """
        self.need(RolloutCapability.PAUSE_IN_PLACE)
        caught = self._caught(case, PauseMode.IN_PLACE)
        assert _following(caught) not in _anew(case, caught), "its KV was computed again"

    @pytest.mark.parametrize("mode", [PauseMode.WAIT, PauseMode.KEEP])
    def test_requests_in_flight_follow_on_update(self, case: RolloutCase, mode: PauseMode) -> None:
        """Without anybody pausing: an update lets them finish, or go on as the new version."""
        self.need(MODES[mode])
        spans = 2 if mode is PauseMode.KEEP else 1
        for delay_s in DELAYS_S:
            version, completions = self._updated_meanwhile(case, mode, delay_s)
            assert {item.finish_reason for item in completions} <= {"length"}
            caught = [item for item in completions if _began_under(item, version)]
            for item in caught:
                assert len(item.version_spans) <= spans
                _assert_prefix(item, case.base_a)
            if any(len(item.version_spans) == spans for item in caught):
                return
        pytest.fail("no request was caught in the middle; give a larger `long_tokens`")

    def test_no_answer_mixes_versions(self, case: RolloutCase) -> None:
        """Requests running into updates are refused, aborted, or answered by one version."""
        weights = [(case.given.weights_a, case.base_a), (case.given.weights_b, case.base_b)]
        case.sync(case.given.weights_a)
        stop, answers = threading.Event(), list[Completion]()
        asking = case.in_background(_ask_until, case, stop, answers)
        owner = {}
        for number in range(6):
            chosen, base = weights[number % 2]
            owner[case.sync(chosen)] = base
            case.assert_same(case.fingerprint(), base)
        stop.set()
        asking.result(case.given.timeout_s)
        for item in answers:
            check_completion(item)
            assert len(item.version_spans) <= 1, f"mixed versions: {item.version_spans}"
            if item.version_spans and item.version_spans[0].version in owner:
                _assert_prefix(item, owner[item.version_spans[0].version])

    def any_pause_mode(self) -> PauseMode:
        """A pause mode that the backend has."""
        for mode, capability in MODES.items():
            if capability not in self.lacks:
                return mode
        self.need(RolloutCapability.PAUSE_ABORT)
        raise AssertionError

    def _caught(self, case: RolloutCase, mode: PauseMode) -> Completion:
        """A completion that a paused update came into the middle of; all such are checked."""
        for delay_s in DELAYS_S:
            version, completions = self._paused_update(case, mode, delay_s)
            assert {item.finish_reason for item in completions} <= {"length"}
            both = [item for item in completions if len(item.version_spans) == 2]
            for item in both:
                assert _began_under(item, version)
                _assert_prefix(item, case.base_a)
            if both:
                return both[0]
        pytest.fail("no request was caught in the middle; give a larger `long_tokens`")

    def _paused_update(
        self, case: RolloutCase, mode: PauseMode, delay_s: float | None
    ) -> tuple[PolicyVersion, list[Completion]]:
        """Long requests under A, paused after `delay_s`, an update to B, on again."""
        version, running = self.long_requests(case)
        case.let_run(running, delay_s)
        case.first.pause(mode, case.given.timeout_s)
        try:
            case.sync(case.given.weights_b)
        finally:
            case.first.continue_(case.given.timeout_s)
        return version, self.answers(case, running)

    def _updated_meanwhile(
        self, case: RolloutCase, mode: PauseMode, delay_s: float | None
    ) -> tuple[PolicyVersion, list[Completion]]:
        """Long requests under A, an update to B after `delay_s` that says what becomes of them."""
        version, running = self.long_requests(case)
        case.let_run(running, delay_s)
        usual = case.first.on_update
        for adapter in case.given.adapters:
            adapter.on_update = mode
        try:
            case.sync(case.given.weights_b)
        finally:
            for adapter in case.given.adapters:
                adapter.on_update = usual
        return version, self.answers(case, running)

    def long_requests(self, case: RolloutCase) -> "tuple[PolicyVersion, Future[list[Completion]]]":
        """Long requests under A, just sent, and the version that they begin with."""
        version = case.sync(case.given.weights_a)
        sampling = SamplingParams(0.0, max_tokens=case.given.long_tokens, ignore_eos=True)
        return version, case.in_background(
            case.first.generate, case.requests(sampling), case.given.timeout_s
        )

    def answers(self, case: RolloutCase, running: "Future[list[Completion]]") -> list[Completion]:
        """What became of requests into which an update to B came."""
        try:
            completions = running.result(case.given.timeout_s)
        except RolloutError:
            completions = []  # it came while the gate was closed
        for completion in completions:
            check_completion(completion)
        case.assert_same(case.fingerprint(), case.base_b)
        return completions

    def _assert_recomputed(self, case: RolloutCase, kept: Completion) -> None:
        """After the switch the tokens are those of B alone, given what was there before."""
        if RolloutCapability.KEEP_RECOMPUTES in self.lacks:
            return
        assert _following(kept) in _anew(case, kept)


MODES = {
    PauseMode.KEEP: RolloutCapability.PAUSE_KEEP,
    PauseMode.ABORT: RolloutCapability.PAUSE_ABORT,
    PauseMode.WAIT: RolloutCapability.PAUSE_WAIT,
    PauseMode.IN_PLACE: RolloutCapability.PAUSE_IN_PLACE,
}
"""What a backend must have for each mode."""


def _seeded(case: RolloutCase, count: int, max_tokens: int) -> list[GenerateRequest]:
    """Requests that differ in their seeds only."""
    prompts = [case.given.prompts[0]]
    samplings = [SamplingParams(max_tokens=max_tokens, seed=seed) for seed in range(count)]
    return [request for sampling in samplings for request in case.requests(sampling, prompts)]


def _first_tokens(case: RolloutCase, prompt: Sequence[int], temperature: float) -> dict[int, float]:
    """Log-probabilities of the first tokens that 48 samples began with."""
    samplings = [SamplingParams(temperature, max_tokens=1, seed=seed) for seed in range(48)]
    requests = [case.requests(sampling, [prompt])[0] for sampling in samplings]
    return {item.token_ids[0]: item.log_probs[0] for item in case.generate(requests)}


def _began_under(item: Completion, version: PolicyVersion) -> bool:
    return bool(item.version_spans) and item.version_spans[0].version == version


def _assert_prefix(item: Completion, base: Fingerprint) -> None:
    """Tokens of the first span are those that its version samples greedily."""
    end = item.version_spans[0].end if item.version_spans else 0
    known = [tokens[:end] for tokens, _ in base]
    mine = item.token_ids[: min(end, GREEDY.max_tokens)]
    assert mine in [tokens[: len(mine)] for tokens in known], "tokens of another version"


def _following(kept: Completion) -> list[int]:
    """Tokens of the second version."""
    return kept.token_ids[kept.version_spans[1].start :]


def _anew(case: RolloutCase, kept: Completion) -> list[list[int]]:
    """What the version that is served now samples after each prompt and the first one's tokens."""
    start = kept.token_ids[: kept.version_spans[1].start]
    prompts = [[*prompt, *start] for prompt in case.given.prompts]
    sampling = SamplingParams(0.0, max_tokens=len(_following(kept)), ignore_eos=True)
    return [item.token_ids for item in case.generate(case.requests(sampling, prompts))]


def _ask_until(case: RolloutCase, stop: threading.Event, answers: list[Completion]) -> None:
    end = time.monotonic() + case.given.timeout_s
    while not stop.is_set() and time.monotonic() < end:
        try:
            answers += case.first.generate(case.requests(GREEDY), case.given.timeout_s)
        except RolloutError:
            time.sleep(0.001)  # refused while an update is under way
