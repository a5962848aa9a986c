"""Who keeps the engine from scheduling: the user (`pause`), a weight update, or both."""

import asyncio
import contextlib
import logging

from rl_core.deadlines import Deadline
from rl_core.errors import LifecycleError, RolloutError, TransferTimeoutError
from rl_core.gate import ServingGate
from rl_core.interfaces import PauseMode
from rl_core.rollout.engine import Engine

logger = logging.getLogger(__name__)

_ABORT_S = 5.0
"""Seconds in which a living engine ends its requests."""

_LATE_S = 1.0
"""Seconds for requests to reach the engine that were let in just before the gate was closed."""

_POLL_S = 0.01


class Pauses:
    """The engine schedules only while nobody holds it. Runs in the server's event loop."""

    def __init__(self, engine: Engine, gate: ServingGate) -> None:
        self._engine = engine
        self._gate = gate
        self._by_user: PauseMode | None = None
        self._pausing: asyncio.Task[None] | None = None
        self._by_update = False
        self._kept = False

    async def pause(self, mode: PauseMode, seconds: float) -> None:
        """Hold for the user; requests in flight end or stay as `mode` says.

        A pause that fails holds nothing; an earlier one still does.

        Errors: TransferTimeoutError if requests have not ended after so many seconds (`wait`);
        LifecycleError if they cannot (`wait` for what is kept), or if another call to `pause` or
        `continue_` came before they had; RolloutError.
        """
        if mode is PauseMode.WAIT:
            self._check_none_kept()
        self._overtake()
        task = self._pausing = asyncio.create_task(self._hold(mode))
        try:
            await asyncio.wait({task}, timeout=seconds)
            if task.done():
                await task
                return
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            msg = f"the pause ({mode.value}) was overtaken by another pause or continue_"
            raise LifecycleError(msg) from None
        except RolloutError:
            # The engine may have stopped before it failed. If it cannot go on, the cause is told.
            if self._pausing is task:
                with contextlib.suppress(RolloutError):
                    await self._resume_if_free()
            raise
        finally:
            task.cancel()
        await self._resume_if_free()
        msg = f"requests in flight have not ended in {seconds:.1f} s ({mode.value}): not paused"
        raise TransferTimeoutError(msg)

    async def continue_(self) -> None:
        """Let go for the user."""
        self._overtake()
        self._kept |= self._by_update and self._by_user is not None and self._by_user.keeps
        self._by_user = None
        await self._resume_if_free()

    async def begin_update(self, mode: PauseMode, seconds: float) -> None:
        """Hold for an update. Requests in flight end or stay as `mode` says, or as the user did.

        Errors: TransferTimeoutError if they have not ended after so many seconds (`wait`).
        """
        self._by_update = True
        try:
            async with asyncio.timeout(seconds):
                if self._pausing is not None:
                    await asyncio.wait({self._pausing})
                if self._by_user is not None:
                    return
                self._kept = mode is PauseMode.KEEP
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

    async def end_requests(self) -> None:
        """Abort what is still there after a failed update: nothing can go on with it."""
        if not self._gate.in_flight:
            self._kept = False
            return
        try:
            async with asyncio.timeout(_ABORT_S):
                await self.abort()
        except (RolloutError, TimeoutError) as error:
            logger.warning("requests could not be ended after a failed update: %s", error)

    async def abort(self) -> None:
        """Hold for an update and abort every request: kept ones, and those that wait or come late.

        The gate must be closed.
        """
        self._by_update, self._kept = True, False
        if self._by_user is not None and self._by_user.keeps:
            self._by_user = PauseMode.ABORT
        end = Deadline.after(_LATE_S)
        await self._engine.pause(PauseMode.ABORT)
        while self._gate.in_flight and not end.expired:
            await asyncio.sleep(_POLL_S)
            await self._engine.pause(PauseMode.ABORT)

    async def _hold(self, mode: PauseMode) -> None:
        await self._engine.pause(mode)
        self._by_user = mode
        self._kept &= mode is not PauseMode.ABORT

    def _overtake(self) -> None:
        """End a pause of the user's that still waits: it would hold what others think is free."""
        if self._pausing is not None:
            self._pausing.cancel()

    def _check_none_kept(self) -> None:
        """Requests that are kept go on when the pause is over, not before."""
        if self._by_user is not None and self._by_user.keeps:
            told = f"pause({self._by_user.value}) keeps requests until continue_"
        elif self._by_update and self._kept:
            told = "an update keeps requests until it is committed"
        else:
            return
        raise LifecycleError(f"cannot wait for requests in flight: {told}")

    async def _resume_if_free(self) -> None:
        if self._by_user is None and not self._by_update:
            await self._engine.resume()
