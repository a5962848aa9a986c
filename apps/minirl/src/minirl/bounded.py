"""Calls that may hang, given a limited time."""

import logging
import threading
import time
from collections.abc import Callable

from rl_core.deadlines import Deadline

_logger = logging.getLogger(__name__)

_EVERY_S = 0.01

END_S = 26.0
"""Seconds that the stages of the end of a run have together; what still runs then is killed."""


class Ending:
    """The time that the end of a run may take, shared by its stages; the first starts the clock."""

    def __init__(self, seconds: float = END_S) -> None:
        self._seconds = seconds
        self._deadline: Deadline | None = None

    def at_most(self, seconds: float) -> float:
        """What a stage may take: `seconds`, or what the ones before it have left."""
        if self._deadline is None:
            self._deadline = Deadline.after(self._seconds)
        return self._deadline.sooner(seconds).remaining()


def bounded(
    function: Callable[[], object],
    seconds: float,
    what: str,
    meanwhile: Callable[[], object] = lambda: None,
) -> bool:
    """Run `function` in a thread and wait for it; whether it ended in time.

    `meanwhile` is called here again and again while it runs, and once after it.

    For the end of a run, where whatever it did not stop is killed afterwards. An error of the
    function is logged, a thread that hangs is left to the end of the process.
    """
    thread = threading.Thread(target=_logged, args=(function, what), name=what, daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(_EVERY_S)
        meanwhile()
    meanwhile()
    return not thread.is_alive()


def _logged(function: Callable[[], object], what: str) -> None:
    try:
        function()
    except Exception as error:  # noqa: BLE001  (nothing may come between a run and its end)
        _logger.debug("%s: %s", what, error)
