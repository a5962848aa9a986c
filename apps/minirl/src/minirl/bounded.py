"""Calls that may hang, given a limited time."""

import logging
import threading
import time
from collections.abc import Callable

_logger = logging.getLogger(__name__)

_EVERY_S = 0.01


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
