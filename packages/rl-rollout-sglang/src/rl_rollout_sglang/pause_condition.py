"""Where SGLang lets requests wait that come while it is paused; imported in the server only.

SGLang's abort ends what its schedulers have. What waits here has not been sent to them, and would
wait for the next `continue_`, however long that takes.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

from fastapi import HTTPException

T = TypeVar("T")

WAITED = "it was aborted while it waited for a pause to end"


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

    async def wait_for(self, predicate: Callable[[], T]) -> T:
        """Wait until `predicate` holds; EndedWaitError if `end_waiting` comes first."""
        began = self._ended
        while not (held := predicate()):
            await self.wait()
            if self._ended != began:
                raise EndedWaitError(HTTPStatus.SERVICE_UNAVAILABLE, self.refusal() or WAITED)
        return held

    async def end_waiting(self) -> None:
        """End all that wait."""
        async with self:
            self._ended += 1
            self.notify_all()
