"""Where the time of a step goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Account the block to phase `name`, one of `PHASES`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        """`timing_s/<phase>` so far, with `timing_s/step` and what no phase accounts for."""
        step = time.perf_counter() - self._start
        seconds = dict(self._seconds)
        seconds["other"] = step - sum(seconds.values())
        seconds["step"] = step
        return {f"timing_s/{name}": value for name, value in seconds.items()}
