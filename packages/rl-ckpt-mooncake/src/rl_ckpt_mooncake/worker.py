"""Threads beside the engine's own, which never blocks inside Mooncake therefore."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rl_core.errors import MiniRLError
from rl_core.transfer.transport import TransportError
from rl_core.transfer.watch import POLL_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.deadlines import Deadline
    from rl_core.transfer.watch import Watch


class StoppedError(MiniRLError):
    """The engine's thread needs this worker no more; never leaves the worker."""


class Worker(ABC):
    """One thread for one version; the thread that made it waits for it under a `Watch`."""

    def __init__(self, name: str, deadline: Deadline, waiting_for: str) -> None:
        """`deadline` is that of the sync: the worker ends by itself then, unless it blocks.

        `waiting_for` is what it says of its work, if the deadline passes over it.
        """
        self._deadline = deadline
        self.waiting_for = waiting_for
        self._changed = threading.Condition()
        self._stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self) -> None:
        """End soon, or when Mooncake returns from its first call to a peer. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def join(self, seconds: float) -> bool:
        """Whether the thread has ended, after at most `seconds`."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def fail_with_it(self) -> None:
        """Raise in the engine's thread what has ended the worker, if it failed."""
        if self._error is not None:
            raise self._error

    def wait_for(self, done: Callable[[], bool], watch: Watch, what: str) -> None:
        """Engine's thread: until the worker got so far that `done`, or failed."""
        while True:
            with self._changed:
                if not done() and self._error is None:
                    self._changed.wait(POLL_S)
                if done():
                    return
            self.fail_with_it()
            watch.check(what)

    @abstractmethod
    def work(self) -> None:
        """What the thread does; it waits with `await_change` or checks with `go_on`."""

    def go_on(self) -> None:
        """Worker's thread: raise if it is to stop, or the deadline has passed."""
        if self._stopped:
            raise StoppedError
        self._deadline.check(self.waiting_for)

    def await_change(self, ready: Callable[[], bool]) -> None:
        """Worker's thread: until the engine's thread made it `ready`, by `change`."""
        while True:
            with self._changed:
                if ready():
                    return
                self._changed.wait(POLL_S)
            self.go_on()

    def change(self, action: Callable[[], None]) -> None:
        """Either thread: change what the other one waits for."""
        with self._changed:
            action()
            self._changed.notify_all()

    def _main(self) -> None:
        try:
            self.work()
        except StoppedError:
            return
        except MiniRLError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: raised in the other one
            wrapped = TransportError(f"{self._thread.name} failed: {error!r}")
            wrapped.__cause__ = error
            self._fail(wrapped)

    def _fail(self, error: MiniRLError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
