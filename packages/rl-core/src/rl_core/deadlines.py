"""Deadlines and cancellation: every wait in MiniRL has both."""

import threading
import time
from dataclasses import dataclass

from rl_core.errors import LifecycleError, TransferTimeoutError


@dataclass(frozen=True)
class Deadline:
    """A point in monotonic time by which something must have happened.

    Not serialisable on purpose: clocks differ between hosts, so send `remaining()` instead.
    """

    at: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """The deadline `seconds` from now."""
        return cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.at

    def check(self, what: str) -> None:
        """TransferTimeoutError saying what was being waited for, if the time is up."""
        if self.expired:
            raise TransferTimeoutError(f"deadline passed while waiting for {what}")

    def sooner(self, seconds: float) -> "Deadline":
        """This deadline or `seconds` from now, whichever comes first."""
        return Deadline(min(self.at, time.monotonic() + seconds))


class CancelToken:
    """Lets one thread stop another one's wait; may be cancelled many times, the first counts."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._reason = ""

    def cancel(self, reason: str) -> None:
        """Ask the waiting side to stop."""
        with self._lock:
            if not self._event.is_set():
                self._reason = reason
                self._event.set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._event.is_set()

    def check(self) -> None:
        """LifecycleError with the reason, if cancelled."""
        if self._event.is_set():
            raise LifecycleError(f"cancelled: {self._reason}")
