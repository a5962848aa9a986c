"""Which sample of a batch makes a reward function fail: the batch is halved again and again.

A failure shows by itself. A call that hangs cannot be told from one that is slow, so that a half
that does not return soon is only a suspect, to be looked into first. At fault is the single sample
that does not return by itself in the time that the whole batch has; every part that does return
clears its samples, and tells how long others may take.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["hung", "died", "raised", "length"]
Values = list[float | str | None]

_PROBE_S = 2.0
"""Least time after which a part of a batch is suspected of hanging."""
_PACE = 2.0
"""It is not before so many times what it takes at the pace of the samples that returned."""
_SEARCH_S = 30.0
"""Longest search, beside twice the time that a call may take: a hang has cost that time already,
and takes it again for the sample that is named."""
_VAGUE = "; which of them is at fault was not found out"
_SLOW = "; in smaller parts all of them return in time"


@dataclass(frozen=True)
class Failure:
    """How a call failed; `text` follows the function's name in a message."""

    kind: Kind
    text: str


class Found(NamedTuple):
    """Samples at fault, and what to add to a message that names them."""

    samples: Sequence[int]
    note: str = ""


Attempt = Callable[[Sequence[int], float], tuple[Values | Failure, float]]
"""Scores some samples within seconds; what came of it, and the seconds that the function took."""


class FaultSearch:
    """One search for the sample at fault."""

    def __init__(
        self, attempt: Attempt, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing is tried yet.

        Args:
            attempt: tries a part of the batch.
            timeout_s: that of a call on the whole batch.
            clock: seconds.
        """
        self._attempt = attempt
        self._timeout_s = timeout_s
        self._clock = clock
        self._end = math.inf
        self._cleared: set[int] = set()
        self._seconds = 0.0

    @property
    def longest_s(self) -> float:
        """Bound of the whole search."""
        return _SEARCH_S + 2 * self._timeout_s

    def find(self, samples: Sequence[int], kind: Kind) -> Found:
        """The one at fault, or all that it may be.

        Args:
            samples: what failed when it was scored together.
            kind: how it did.
        """
        self._end = self._clock() + self.longest_s
        if len(samples) == 1:
            return Found(samples)
        if kind != "hung":
            left = self._failing(samples, kind)
            return Found(left, _VAGUE if len(left) > 1 else "")
        try:
            found = self._hanging(samples)
        except _TimeIsUpError:
            return Found([at for at in samples if at not in self._cleared], _VAGUE)
        return Found(samples, _SLOW) if found is None else Found([found])

    def _failing(self, samples: Sequence[int], kind: Kind) -> Sequence[int]:
        """Halve as long as a half fails alike."""
        while len(samples) > 1 and self._clock() < self._end:
            for half in _halves(samples):
                limit_s = min(self._timeout_s, max(0.0, self._end - self._clock()))
                outcome, _ = self._attempt(half, limit_s)
                if isinstance(outcome, Failure) and outcome.kind == kind:
                    samples = half
                    break
            else:
                break
        return samples

    def _hanging(self, samples: Sequence[int]) -> int | None:
        """The first of `samples` that hangs by itself; None if each returned in some part.

        Of a pair of halves the second is not tried as a whole: it is where the hang must be if
        the first one is cleared.
        """
        if len(samples) == 1:
            return None if self._returns(samples, self._timeout_s) else samples[0]
        first, second = _halves(samples)
        if len(first) == 1 or not self._returns(first, self._patience(len(first))):
            found = self._hanging(first)
            if found is not None:
                return found
        return self._hanging(second)

    def _patience(self, count: int) -> float:
        pace = self._seconds / len(self._cleared) if self._cleared else 0.0
        return min(self._timeout_s, max(_PROBE_S, _PACE * pace * count))

    def _returns(self, samples: Sequence[int], limit_s: float) -> bool:
        """Whether scoring `samples` ends within the limit, in whatever way."""
        left_s = self._end - self._clock()
        if left_s <= 0:
            raise _TimeIsUpError
        outcome, seconds = self._attempt(samples, min(limit_s, left_s))
        if isinstance(outcome, Failure) and outcome.kind == "hung":
            if left_s < limit_s:
                raise _TimeIsUpError
            return False
        self._cleared.update(samples)
        self._seconds += seconds
        return True


class _TimeIsUpError(Exception):
    """The search has taken as long as it may."""


def _halves(samples: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    middle = len(samples) // 2
    return samples[:middle], samples[middle:]
