"""What ends a wait early: a deadline, a cancelled token, bad news from a peer."""

from collections.abc import Callable, Sequence

from rl_core.deadlines import CancelToken, Deadline
from rl_core.errors import TransferTimeoutError

POLL_S = 0.02
"""Seconds between two looks at a `Watch` in a wait that cannot be woken otherwise."""


class Watch:
    """Looked at by every wait of a sync, at least each `POLL_S`.

    Attributes:
        deadline: of the sync.
    """

    def __init__(
        self,
        deadline: Deadline,
        tokens: Sequence[CancelToken] = (),
        news: Callable[[], None] | None = None,
    ) -> None:
        """`news` raises what a peer has reported meanwhile; it must not block."""
        self.deadline = deadline
        self._tokens = tokens
        self._news = news

    def check(self, what: str) -> None:
        """Raise the reason to stop waiting for `what`, if there is one.

        Errors: LifecycleError (cancelled), the error that a peer reported, TransferError (a peer
        is gone), TransferTimeoutError (here or at a peer; it says what was waited for here).
        """
        for token in self._tokens:
            token.check()
        if self._news is not None:
            try:
                self._news()
            except TransferTimeoutError as late:
                # Deadlines end together; whoever waits for bytes knows best which did not come.
                msg = f"deadline passed while waiting for {what} ({late})"
                raise TransferTimeoutError(msg).counting(late.counts) from late
        self.deadline.check(what)

    def hearing(self, news: Callable[[], None]) -> "Watch":
        """The same watch, with another source of news."""
        return Watch(self.deadline, self._tokens, news)

    def also(self, token: CancelToken) -> "Watch":
        """The same watch, ended by a further token as well."""
        return Watch(self.deadline, (*self._tokens, token), self._news)

    def sooner(self, seconds: float) -> "Watch":
        """The same watch, with a deadline at most `seconds` from now."""
        return Watch(self.deadline.sooner(seconds), self._tokens, self._news)
