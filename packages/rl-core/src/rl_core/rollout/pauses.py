"""Who keeps the engine from scheduling: the user (`pause`), a weight update, or both."""

import asyncio
import logging

from rl_core.errors import RolloutError, TransferTimeoutError
from rl_core.interfaces import PauseMode
from rl_core.rollout.engine import Engine

logger = logging.getLogger(__name__)

_ABORT_S = 5.0
"""Seconds in which a living engine ends its requests."""


class Pauses:
    """The engine schedules only while nobody holds it. Runs in the server's event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._by_user = False
        self._by_update = False
        self._kept = False

    async def pause(self, mode: PauseMode) -> None:
        """Hold for the user; requests in flight end or stay as `mode` says."""
        await self._engine.pause(mode)
        self._by_user = True

    async def continue_(self) -> None:
        """Let go for the user."""
        self._by_user = False
        await self._resume_if_free()

    async def begin_update(self, mode: PauseMode, seconds: float) -> None:
        """Hold for an update. Requests in flight end or stay as `mode` says, or as the user did.

        Errors: TransferTimeoutError if they have not ended after so many seconds (`wait`).
        """
        self._by_update = True
        if self._by_user:
            return
        self._kept = mode is PauseMode.KEEP
        try:
            async with asyncio.timeout(seconds):
                await self._engine.pause(mode)
        except TimeoutError as error:
            msg = (
                f"requests in flight had {seconds:.1f} s to end before the update and have not "
                f"(on_update={mode.value})"
            )
            raise TransferTimeoutError(msg) from error

    async def end_update(self) -> None:
        """Let go after an update."""
        self._by_update = self._kept = False
        await self._resume_if_free()

    async def end_kept(self) -> None:
        """Abort what was kept over an update that has failed: nothing can go on with it."""
        if not self._kept:
            return
        try:
            async with asyncio.timeout(_ABORT_S):
                await self.abort()
        except (RolloutError, TimeoutError) as error:
            logger.warning("requests kept over a failed update could not be ended: %s", error)

    async def abort(self) -> None:
        """Hold for an update and abort every request, kept ones too."""
        await self._engine.pause(PauseMode.ABORT)
        self._by_update, self._kept = True, False

    async def _resume_if_free(self) -> None:
        if not (self._by_user or self._by_update):
            await self._engine.resume()
