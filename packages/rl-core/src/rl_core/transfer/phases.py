"""Where the time of a transfer went."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds by phase, added up over a sync.

    Attributes:
        seconds: by name of the phase.
    """

    def __init__(self, *names: str) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(names, 0.0)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time spent inside to phase `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin
