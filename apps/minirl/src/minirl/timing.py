"""Where the time of a step goes."""

import time
from contextlib import AbstractContextManager

from rl_core.transfer.phases import Phases

PHASES = (
    "generate",
    "reward",
    "old_log_prob",
    "ref",
    "advantage",
    "update_actor",
    "sync",
    "eval",
    "save",
)


class StepTimer:
    """Seconds by phase of one step. Phases do not nest; the same one may come more than once."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases = Phases(*PHASES)
        self._beside: dict[str, float] = {}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Account the block to phase `name`, one of `PHASES`."""
        return self._phases(name)

    def beside(self, name: str, seconds: float) -> None:
        """Account work that was done beside a phase, and so takes no part in the step's sum."""
        self._beside[name] = self._beside.get(name, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """`timing_s/<phase>` so far, with `timing_s/step` and what no phase accounts for.

        What was done beside a phase is there, too.
        """
        step = time.perf_counter() - self._start
        seconds = dict(self._phases.seconds)
        seconds["other"] = step - sum(seconds.values())
        seconds["step"] = step
        seconds |= self._beside
        return {f"timing_s/{name}": value for name, value in seconds.items()}
