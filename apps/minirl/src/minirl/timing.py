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

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Account the block to phase `name`, one of `PHASES`."""
        return self._phases(name)

    def metrics(self) -> dict[str, float]:
        """`timing_s/<phase>` so far, with `timing_s/step` and what no phase accounts for."""
        step = time.perf_counter() - self._start
        seconds = dict(self._phases.seconds)
        seconds["other"] = step - sum(seconds.values())
        seconds["step"] = step
        return {f"timing_s/{name}": value for name, value in seconds.items()}
