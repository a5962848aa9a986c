"""Ends an ASGI application whose engine has died: nobody waits for an answer that cannot come."""

import asyncio

from rl_core.rollout.gated_app import App, Message, Receive, Send, refuse


class EndableApp:
    """ASGI middleware: hands everything on until `end`; then all is refused with 503 and a reason.

    Lives on one event loop, with a task for each connection (as uvicorn runs them).
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._reason: str | None = None
        self._running: set[asyncio.Task[None]] = set()

    def end(self, reason: str) -> None:
        """Refuse what comes and what runs, health checks included. The first reason stays.

        A response that has begun is cut off.
        """
        if self._reason is None:
            self._reason = reason
        for task in self._running:
            task.cancel()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif self._reason is None:
            await self._run(scope, receive, send)
        else:
            await refuse(scope, self._reason, send)

    async def _run(self, scope: Message, receive: Receive, send: Send) -> None:
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await self._app(scope, receive, noting)
        except (asyncio.CancelledError, Exception):
            if self._reason is None:
                raise
            task.uncancel()
            if not begun:
                await refuse(scope, self._reason, send)
        finally:
            self._running.discard(task)
