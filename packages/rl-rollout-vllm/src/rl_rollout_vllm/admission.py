"""Requests that come together are queued together, before the scheduler begins with the first.

An engine that begins with the first request while the others are on their way makes other batches
in every run. The size of a batch decides how floating-point sums are rounded, so that equal
requests would get log-probabilities that differ in their last digits. Imports nothing of vLLM.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from rl_core.errors import RolloutError

logger = logging.getLogger(__name__)

LONGEST_S = 1.0
"""A scheduler that has been held so long is let go: batches that come one after the other, each
before the last one is in, would keep it from all work."""


class Admission:
    """Lets requests into an engine, in the order in which they came.

    Those that come in one turn of the event loop, as all of one call do, are a batch; while one of
    more than a single request is let in, the scheduler is held. Lives on one event loop.
    """

    def __init__(
        self, hold: Callable[[], Awaitable[None]], release: Callable[[], Awaitable[None]]
    ) -> None:
        """What holds the scheduler, so that requests queue, and what lets it go; RolloutError."""
        self._hold = hold
        self._release = release
        self._coming: _Batch | None = None
        self._underway: set[asyncio.Task[None]] = set()
        self._holds = 0
        self._held_since = 0.0
        self._closed = False

    @asynccontextmanager
    async def entering(self) -> AsyncIterator[None]:
        """Wait for this request's turn; it is queued when the block ends.

        Errors: RolloutError if the scheduler could not be held.
        """
        batch = self._coming or self._begin()
        batch.waiting += 1
        try:
            await batch.opened.wait()
            if batch.error is not None:
                raise RolloutError(str(batch.error)) from batch.error
            yield
        finally:
            batch.waiting -= 1
            batch.left.set()

    async def close(self) -> None:
        """Somebody else is about to hold the scheduler; return when it is not held here."""
        self._closed = True
        if self._underway:
            await asyncio.wait(self._underway)

    def reopen(self) -> None:
        """Nobody else holds the scheduler any more."""
        self._closed = False

    def _begin(self) -> "_Batch":
        self._coming = batch = _Batch()
        # It runs after all that is to run already: who comes in this turn is in the batch.
        task = asyncio.create_task(self._let_in(batch))
        self._underway.add(task)
        task.add_done_callback(self._underway.discard)
        return batch

    async def _let_in(self, batch: "_Batch") -> None:
        self._coming = None
        now = asyncio.get_running_loop().time()
        too_long = self._holds > 0 and now - self._held_since > LONGEST_S
        if self._closed or too_long or batch.waiting < 2:
            await batch.enter()
            return
        if not self._holds:
            self._held_since = now
        self._holds += 1
        try:
            await self._hold()
        except RolloutError as error:
            batch.error = error
        await batch.enter()
        self._holds -= 1
        if self._holds:
            return
        try:
            await self._release()
        except RolloutError as error:
            logger.warning("requests are queued, but the engine does not go on: %s", error)


class _Batch:
    """Requests that wait to be let in."""

    def __init__(self) -> None:
        self.waiting = 0
        self.opened = asyncio.Event()
        self.left = asyncio.Event()
        self.error: RolloutError | None = None

    async def enter(self) -> None:
        """Open, and return when nobody is left outside."""
        self.opened.set()
        while self.waiting:
            self.left.clear()
            await self.left.wait()
