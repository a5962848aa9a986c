"""Waiting for what another process writes into memory: nobody can wake us for that."""

import time
from collections.abc import Callable

SHORTEST_S = 1e-4
LONGEST_S = 2e-3
"""Pauses between two looks."""

_SHARE = 0.05
"""Pauses grow with the time waited, so that they add no more than this share to it."""


def wait_until(ready: Callable[[], bool], check: Callable[[], None]) -> None:
    """Return once `ready`; `check` raises the reason to stop waiting, if there is one."""
    begin = time.monotonic()
    while not ready():
        check()
        waited = time.monotonic() - begin
        time.sleep(min(LONGEST_S, max(SHORTEST_S, waited * _SHARE)))
