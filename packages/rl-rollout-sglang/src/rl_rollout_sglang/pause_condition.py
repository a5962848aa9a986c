"""Where SGLang lets requests wait that come while it is paused; imported in the server only.

SGLang's abort ends what its schedulers have. What waits here has not been sent to them, and would
wait for the next `continue_`, however long that takes.
"""

import asyncio
from collections.abc import Callable, Iterable, Set
from contextvars import ContextVar
from http import HTTPStatus
from typing import TypeVar

from fastapi import HTTPException

T = TypeVar("T")

WAITED = "it was aborted while it waited for a pause to end"

REQUESTS: ContextVar[Iterable[str]] = ContextVar("REQUESTS", default=())
"""Ids of the requests (one HTTP request may have many) that the running task has just begun."""


class EndedWaitError(HTTPException):
    """A request was ended before it was sent to a scheduler.

    SGLang's handlers make status 503 of it, as of what their schedulers refuse.
    """


class PauseCondition(asyncio.Condition):
    """Takes the place of the tokenizer manager's `is_pause_cond`.

    Attributes:
        refusal: why nothing is served at present, for the error; None while requests are answered.
    """

    def __init__(self, refusal: Callable[[], str | None] = lambda: None) -> None:
        super().__init__()
        self.refusal = refusal
        self._ended = 0
        self._waiting: set[str] = set()

    def holds(self, requests: Set[str]) -> bool:
        """Whether all of these wait here, so that a scheduler has none of them."""
        return requests <= self._waiting

    async def wait_for(self, predicate: Callable[[], T]) -> T:
        """Wait until `predicate` holds; EndedWaitError if `end_waiting` comes first."""
        began, mine = self._ended, set(REQUESTS.get())
        self._waiting |= mine
        try:
            while not (held := predicate()):
                await self.wait()
                if self._ended != began:
                    raise EndedWaitError(HTTPStatus.SERVICE_UNAVAILABLE, self.refusal() or WAITED)
            return held
        finally:
            self._waiting -= mine

    async def end_waiting(self) -> None:
        """End all that wait."""
        async with self:
            self._ended += 1
            self.notify_all()
