"""Who keeps the engine from scheduling: the user (`pause`), a weight update, or both."""

from rl_core.interfaces import PauseMode
from rl_core.rollout.engine import Engine


class Pauses:
    """The engine schedules only while nobody holds it. Runs in the server's event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._by_user = False
        self._by_update = False

    async def pause(self, mode: PauseMode) -> None:
        """Hold for the user; requests in flight end or stay as `mode` says."""
        await self._engine.pause(mode)
        self._by_user = True

    async def continue_(self) -> None:
        """Let go for the user."""
        self._by_user = False
        await self._resume_if_free()

    async def begin_update(self) -> None:
        """Hold for an update. Requests in flight are aborted unless the user keeps them."""
        if not self._by_user:
            await self._engine.pause(PauseMode.ABORT)
        self._by_update = True

    async def end_update(self) -> None:
        """Let go after an update."""
        self._by_update = False
        await self._resume_if_free()

    async def abort(self) -> None:
        """Hold for an update and abort every request, kept ones too."""
        await self._engine.pause(PauseMode.ABORT)
        self._by_update = True

    async def _resume_if_free(self) -> None:
        if not (self._by_user or self._by_update):
            await self._engine.resume()
