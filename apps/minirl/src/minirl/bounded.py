"""Calls that may hang, given a limited time."""

import logging
import threading
from collections.abc import Callable

_logger = logging.getLogger(__name__)


def bounded(function: Callable[[], object], seconds: float, what: str) -> bool:
    """Run `function` in a thread and wait for it; whether it ended in time.

    For the end of a run, where whatever it did not stop is killed afterwards. An error of the
    function is logged, a thread that hangs is left to the end of the process.
    """
    thread = threading.Thread(target=_logged, args=(function, what), name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _logged(function: Callable[[], object], what: str) -> None:
    try:
        function()
    except Exception as error:  # noqa: BLE001  (nothing may come between a run and its end)
        _logger.debug("%s: %s", what, error)
