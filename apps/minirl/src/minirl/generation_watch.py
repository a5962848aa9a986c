"""Watches what a replica was asked to generate, as long as it makes progress."""

from collections.abc import Sequence

import msgspec

from rl_core.deadlines import Deadline
from rl_core.errors import MiniRLError, RolloutError
from rl_core.interfaces import Pending, RolloutAdapter, SupportsEarlyCompletions, SupportsProgress
from rl_core.trajectory import Completion, GenerateRequest

_LOOK_S = 5.0
"""Seconds between two looks at a replica, and for its answer."""
_LOOKS = 4
"""At least so many looks before a replica counts as stalled."""
_GATHER_S = 0.05
"""What ends within this time is asked for together."""
_NEWS_S = 0.2
"""Longest wait for the next completion before the call itself is looked at again."""


class GenerationLimits(msgspec.Struct, frozen=True):
    """How long a replica may take.

    Attributes:
        timeout_s: for all that it was asked at once.
        stall_s: without a token, while it owes some.
    """

    timeout_s: float = 3600.0
    stall_s: float = 300.0


class StalledError(RolloutError):
    """A replica makes no token of what it was asked for. Itself the evidence of a failure."""


class GenerationWatch:
    """One replica's call under way.

    A replica whose backend tells of no progress has only the one deadline.

    Attributes:
        over: whether the call has ended, and all has been given out.
    """

    def __init__(
        self,
        call: Pending,
        leader: RolloutAdapter,
        limits: GenerationLimits,
        early: Sequence[GenerateRequest] = (),
    ) -> None:
        """Watch `call`.

        Args:
            call: a `generate`.
            leader: the replica's adapter.
            limits: how long it may take.
            early: requests of the call that are given out before it ends, if the backend can.
        """
        self.over = False
        self._call = call
        self._limits = limits
        self._deadline = Deadline.after(limits.timeout_s)
        self._look_s = min(_LOOK_S, limits.stall_s / _LOOKS)
        self._next_look = Deadline.after(self._look_s)
        self._progress: _Progress | None = None
        if isinstance(leader, SupportsProgress):
            self._progress = _Progress(leader, limits.stall_s)
        self._early: _Early | None = None
        if isinstance(leader, SupportsEarlyCompletions):
            self._early = _Early(leader, early)

    def news(self, share: float) -> list[Completion]:
        """What has ended since, after a wait for it; everything once the call is over.

        Args:
            share: of the usual wait; there are others to watch.

        Errors: the call's own; StalledError; RolloutError if the time is up while it still works.
        """
        early = self._early if self._early is not None and self._early.left else None
        wait_s = self._look_s if early is None else min(_GATHER_S, self._look_s)
        try:
            completions: list[Completion] = self._call.result(
                min(wait_s * share, self._deadline.remaining())
            )
        except TimeoutError:
            self._check()
            return [] if early is None else early.ended(_NEWS_S * share, self._look_s)
        self.over = True
        return completions

    def _check(self) -> None:
        if self._deadline.expired:
            limit = f"{self._limits.timeout_s:.0f} s (rollout.generate_timeout_s)"
            raise RolloutError(f"generation has not ended in {limit}")
        if self._progress is not None and self._next_look.expired:
            self._progress.look(self._look_s)
            self._next_look = Deadline.after(self._look_s)


class _Early:
    """Asks a replica for what has ended of its call.

    Attributes:
        left: ids of the requests that have not been told of.
    """

    def __init__(
        self, leader: SupportsEarlyCompletions, requests: Sequence[GenerateRequest]
    ) -> None:
        self._leader = leader
        self.left = dict.fromkeys(request.request_id for request in requests)

    def ended(self, wait_s: float, answer_s: float) -> list[Completion]:
        """The next ones. No answer is no news: the call itself tells what is wrong.

        What was aborted waits for the call: if that fails, it is asked again elsewhere.
        """
        try:
            found = self._leader.finished(list(self.left), wait_s, wait_s + answer_s)
        except (MiniRLError, TimeoutError):
            return []
        for completion in found:
            self.left.pop(completion.request_id, None)
        return [completion for completion in found if completion.finish_reason != "abort"]


class _Progress:
    """Looks at a replica now and then."""

    def __init__(self, leader: SupportsProgress, stall_s: float) -> None:
        self._leader = leader
        self._stall_s = stall_s
        self._seen: int | None = None
        self._late = Deadline.after(stall_s)

    def look(self, timeout_s: float) -> None:
        """StalledError if nothing has changed for too long; no answer is no change."""
        made: int | None
        try:
            made = self._leader.tokens_made(timeout_s)
        except (MiniRLError, TimeoutError):
            made = self._seen
        if made != self._seen:
            self._seen, self._late = made, Deadline.after(self._stall_s)
        elif self._late.expired:
            msg = f"it has made no token for {self._stall_s:.0f} s (rollout.stall_timeout_s)"
            raise StalledError(msg)
