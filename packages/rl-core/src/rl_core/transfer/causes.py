"""Which of several failures is the cause."""

import time
from collections.abc import Callable

from rl_core.errors import MiniRLError
from rl_core.transfer.watch import POLL_S

GRACE_S = 1.0
"""Seconds in which a peer's own account of a failure is waited for."""


def known_cause(error: MiniRLError, news: Callable[[], None]) -> MiniRLError:
    """What a peer reports, or that it is gone, if that is heard soon; else `error` itself.

    A transport often notices first that something is wrong, and cannot say what.
    """
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end:
        try:
            news()
        except MiniRLError as cause:
            return cause
        time.sleep(POLL_S)
    return error
