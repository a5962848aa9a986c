"""Whom a pause holds, for how long, and what ends it."""

import time
from concurrent.futures import wait
from typing import TYPE_CHECKING

import pytest

from rl_core.errors import LifecycleError, RolloutError, TransferTimeoutError
from rl_core.interfaces import PauseMode
from rl_core.testing.rollout_case import RolloutCapability, RolloutCase, check_completion
from rl_core.testing.rollout_serving_contract import DELAYS_S, MODES, ServingContract
from rl_core.trajectory import Completion
from rl_core.versions import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

SOON_S = 5.0
"""What needs nothing but an answer has this long for it."""

SHORT_S = 0.1
"""Longer than a pause takes that has nobody to wait for, shorter than a long request."""


class PauseContract(ServingContract, contract=True):
    """No pause waits for what cannot come, and none holds what it says it does not."""

    @pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.IN_PLACE])
    def test_kept_requests_are_not_waited_for(self, case: RolloutCase, mode: PauseMode) -> None:
        """They go on after `continue_`: to wait for them before would be in vain."""
        self.need(MODES[mode])
        self.need(RolloutCapability.PAUSE_WAIT)
        for version, running in self._underway(case):
            case.first.pause(mode, case.given.timeout_s)
            began = time.monotonic()
            with pytest.raises(LifecycleError):
                case.first.pause(PauseMode.WAIT, case.given.timeout_s)
            assert time.monotonic() - began < min(SOON_S, case.given.timeout_s)
            kept = not wait([running], SHORT_S).done
            case.first.continue_(case.given.timeout_s)
            _assert_whole(case, running, version)
            if kept:
                return
        pytest.fail("no request was kept over a pause; give a larger `long_tokens`")

    def test_nothing_kept_goes_on_with_what_is_not_committed(self, case: RolloutCase) -> None:
        """Nor does a pause make it: that would be answered by weights of no version."""
        self.need(RolloutCapability.PAUSE_KEEP)
        self.need(RolloutCapability.PAUSE_WAIT)
        version, running = next(self._underway(case))
        case.first.pause(PauseMode.KEEP, case.given.timeout_s)
        manifest = case.given.weights_b.manifest(case.version())
        case.update(case.given.weights_b, manifest=manifest)
        over = running.done()
        case.first.continue_(case.given.timeout_s)
        with pytest.raises(LifecycleError):
            case.first.pause(PauseMode.WAIT, case.given.timeout_s)
        wait([running], SHORT_S)
        assert running.done() == over, "a request went on between two versions"
        case.first.commit(manifest.version, case.given.timeout_s)
        for completion in _results(case, running):
            versions = [span.version for span in completion.version_spans]
            assert versions in ([version], [version, manifest.version], [manifest.version])
        case.assert_same(case.fingerprint(), case.base_b)

    def test_a_pause_that_waits_too_long_holds_nothing(self, case: RolloutCase) -> None:
        """It says so, and the next update finds an engine that it has to pause itself."""
        self.need(RolloutCapability.PAUSE_WAIT)
        running = self._not_waited_for(case)
        case.assert_same(case.fingerprint(), case.base_a)
        case.sync(case.given.weights_b)
        for completion in self.answers(case, running):
            assert len(completion.version_spans) <= 1, f"mixed: {completion.version_spans}"

    def test_continue_ends_a_pause_that_waits(self, case: RolloutCase) -> None:
        """Whoever waited is told; nothing is held later by a pause that nobody ends."""
        self.need(RolloutCapability.PAUSE_WAIT)
        for version, running in self._underway(case):
            pausing = case.in_background(case.first.pause, PauseMode.WAIT, case.given.timeout_s)
            time.sleep(SHORT_S)
            case.first.continue_(case.given.timeout_s)
            _assert_whole(case, running, version)
            if isinstance(pausing.exception(case.given.timeout_s), LifecycleError):
                break
        else:
            pytest.fail("no pause was overtaken")
        case.assert_same(case.fingerprint(), case.base_a)

    def test_a_fence_ends_requests_that_a_pause_has_queued(self, case: RolloutCase) -> None:
        """They are not left to wait for a commit that may never come."""
        mode = self.any_pause_mode()
        case.sync(case.given.weights_a)
        case.first.pause(mode, case.given.timeout_s)
        try:
            waiting = case.in_background(case.fingerprint)
            assert not wait([waiting], SHORT_S).done, "a request was answered during a pause"
            case.first.fence("nothing more comes", case.given.timeout_s)
            assert wait([waiting], min(SOON_S, case.given.timeout_s)).done, (
                "a request waits for a fenced replica"
            )
            error = waiting.exception()
            assert error is None or isinstance(error, RolloutError), repr(error)
            assert error is not None or not any(tokens for tokens, _ in waiting.result())
            case.assert_fenced("nothing more comes")
        finally:
            case.first.continue_(case.given.timeout_s)
        case.assert_repaired_by_sync()

    def _not_waited_for(self, case: RolloutCase) -> "Future[list[Completion]]":
        """Long requests, after a pause had too little time for them to end."""
        for _, running in self._underway(case):
            try:
                case.first.pause(PauseMode.WAIT, SHORT_S)
            except (TransferTimeoutError, RolloutError):
                return running
        pytest.fail("no request took longer than a pause; give a larger `long_tokens`")

    def _underway(
        self, case: RolloutCase
    ) -> "Iterator[tuple[PolicyVersion, Future[list[Completion]]]]":
        """Long requests that have run for a while, some longer than others; never paused."""
        for delay_s in DELAYS_S:
            case.first.continue_(case.given.timeout_s)
            version, running = self.long_requests(case)
            case.let_run(running, delay_s)
            yield version, running


def _results(case: RolloutCase, running: "Future[list[Completion]]") -> list[Completion]:
    completions = running.result(case.given.timeout_s)
    for completion in completions:
        check_completion(completion)
        assert completion.finish_reason == "length"
    return completions


def _assert_whole(
    case: RolloutCase, running: "Future[list[Completion]]", version: PolicyVersion
) -> None:
    """Long requests were answered to their end, all by one version."""
    for completion in _results(case, running):
        assert [span.version for span in completion.version_spans] == [version]
        assert len(completion.token_ids) == case.given.long_tokens


PAUSES = tuple(name for name in vars(PauseContract) if name.startswith("test_"))
"""The tests of this part, for a backend whose replicas all pause by the same code."""
