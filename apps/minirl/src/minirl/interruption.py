"""Ending a run by a signal, without breaking native code in the middle of a call.

A signal raises `Interrupted` in the main thread at once, unless that is inside `deferred()`: an
exception that surfaces in the middle of Ray's native calls corrupts them, so there it waits for
the end of the block. Blocks are short: a long wait is a loop of short ones.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SIGNAL_BASE = 128
"""Exit code after signal n, less n; what shells use."""

POLL_S = 0.5
"""Longest single wait inside `deferred()`, in seconds."""


class Interrupted(BaseException):
    """A signal asks the run to end. Not an Exception, so that nothing swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class _State:
    depth: int = 0
    received: int | None = None


_state = _State()


def received() -> int | None:
    """The signal that asked for the end, if one did."""
    return _state.received


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Hold an interruption back until the end of the block; no effect in other threads.

    It takes the place of an error of the block: a signal to the whole process group ends the
    processes that the block waits for, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
        if _state.depth == 0 and _state.received is not None:
            raise Interrupted(_state.received)


@contextlib.contextmanager
def interrupting() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP interrupt the block."""
    with _handled(_interrupt):
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore the signals: the end is under way, and nothing may be left behind."""
    with _handled(signal.SIG_IGN):
        _state.depth += 1
        try:
            yield
        finally:
            _state.depth -= 1


def put_handlers_back() -> None:
    """Handle the signals as Python believes that they are, whatever native code has made of it."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if handler is not None:  # else it was set before Python, and stays
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _state.received = number
    if _state.depth == 0:
        raise Interrupted(number)


@contextlib.contextmanager
def _handled(handler: "signal._HANDLER") -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
