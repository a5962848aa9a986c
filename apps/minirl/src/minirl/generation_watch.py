"""Waits for what a replica was asked to generate, as long as it makes progress."""

from typing import TYPE_CHECKING

import msgspec

from rl_core.deadlines import Deadline
from rl_core.errors import MiniRLError, RolloutError
from rl_core.interfaces import Pending, RolloutAdapter, SupportsProgress

if TYPE_CHECKING:
    from rl_core.trajectory import Completion

_LOOK_S = 5.0
"""Seconds between two looks at a replica, and for its answer."""
_LOOKS = 4
"""At least so many looks before a replica counts as stalled."""


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


def completions_of(
    call: Pending, leader: RolloutAdapter, limits: GenerationLimits
) -> "list[Completion]":
    """What the call gives, in the end.

    A replica whose backend tells of no progress has only the one deadline.

    Errors: the call's own; StalledError; RolloutError if the time is up while it still works.
    """
    deadline = Deadline.after(limits.timeout_s)
    look_s = min(_LOOK_S, limits.stall_s / _LOOKS)
    progress = _Progress(leader, limits.stall_s) if isinstance(leader, SupportsProgress) else None
    while not deadline.expired:
        try:
            completions: list[Completion] = call.result(min(look_s, deadline.remaining()))
        except TimeoutError:
            if progress is not None:
                progress.look(look_s)
        else:
            return completions
    msg = f"generation has not ended in {limits.timeout_s:.0f} s (rollout.generate_timeout_s)"
    raise RolloutError(msg)


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
