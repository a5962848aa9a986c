"""What has ended is told before the call that it belongs to has."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_core.interfaces import PauseMode, SupportsEarlyCompletions
from rl_core.testing.contract import Contract
from rl_core.testing.rollout_case import RolloutCapability, RolloutCase
from rl_core.trajectory import Completion, SamplingParams

if TYPE_CHECKING:
    from concurrent.futures import Future

FEW = 2
"""Tokens of a short request."""


class EarlyContract(Contract, contract=True):
    """Early completions are those that the call returns, and nothing is kept of them after it."""

    def test_what_has_ended_is_told_before_the_call_ends(self, case: RolloutCase) -> None:
        """The short samples of a call beside a long one, and beside another call's."""
        self.need(RolloutCapability.EARLY_COMPLETIONS)
        case.sync(case.given.weights_a)
        short = SamplingParams(temperature=0.0, max_tokens=FEW, ignore_eos=True, n=2)
        long = SamplingParams(temperature=0.0, max_tokens=case.given.long_tokens, ignore_eos=True)
        prompts = case.given.prompts[:1]
        other = case.requests(long, prompts)
        call = [*case.requests(short, prompts), *case.requests(long, prompts)]
        names = [sample.request_id for request in call for sample in request.samples()]
        assert finished(case, names) == [], "of a call that has not been made"

        beside = case.in_background(case.first.generate, other, case.given.timeout_s)
        running = case.in_background(case.first.generate, call, case.given.timeout_s)
        early = _until_one_is_left(case, names, running)
        self._cut_short(case)
        completions = running.result(case.given.timeout_s)
        assert early == {item.request_id: item for item in completions[:-1]}
        beside.result(case.given.timeout_s)
        assert finished(case, [*names, other[0].request_id]) == [], "of a call that has ended"

    def _cut_short(self, case: RolloutCase) -> None:
        """Nobody needs to wait for the long requests, where the engine can abort them."""
        if RolloutCapability.PAUSE_ABORT not in self.lacks:
            case.first.pause(PauseMode.ABORT, case.given.timeout_s)
            case.first.continue_(case.given.timeout_s)


def finished(case: RolloutCase, names: Sequence[str], wait: float = 0.0) -> list[Completion]:
    """What the replica tells of these; fails unless it can."""
    adapter = case.first
    assert isinstance(adapter, SupportsEarlyCompletions), (
        "the adapter has no `finished`; declare in `lacks` that it tells nothing early"
    )
    return adapter.finished(names, wait, case.given.timeout_s)


def _until_one_is_left(
    case: RolloutCase, names: Sequence[str], running: "Future[list[Completion]]"
) -> dict[str, Completion]:
    """What is told of a call while it runs, until only its last sample is missing."""
    early: dict[str, Completion] = {}
    while len(early) < len(names) - 1:
        assert not running.done(), "its short samples were not told early; see `long_tokens`"
        left = [name for name in names if name not in early]
        for completion in finished(case, left, case.given.timeout_s / 4):
            assert completion.request_id in left, "of a request that was not asked for"
            early[completion.request_id] = completion
    assert names[-1] not in early, "the long sample has ended; give a larger `long_tokens`"
    return early
