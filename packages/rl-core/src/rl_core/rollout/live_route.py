"""An HTTP path on which a server tells what its engine holds, as digests. It only reads.

    GET /rl/live_digests  ->  LiveWeights as JSON, or {"error": ...}

It takes no parameters, runs nothing that a client names, and tells digests, names of tensors and a
few settings: no weights. Each answer costs one pass over the weights, in which the engine computes
nothing else, so that only one is made at a time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from rl_core.errors import MiniRLError
from rl_core.interfaces import LiveWeights
from rl_core.rollout.gated_app import App, Message, Receive, Send

PATH = "/rl/live_digests"

Look = Callable[[Message], Awaitable[LiveWeights]]
"""Asks the engine; given the ASGI scope of the request."""


class LiveRoute:
    """ASGI middleware: answers `PATH`, hands everything else on."""

    def __init__(self, app: App, look: Look) -> None:
        self._app = app
        self._look = look
        self._looking = asyncio.Lock()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http" or scope.get("path") != PATH:
            await self._app(scope, receive, send)
        elif scope.get("method") != "GET":
            await _answer(405, _problem(f"{PATH} can only be read"), send)
        else:
            await _answer(*await self._content(scope), send)

    async def _content(self, scope: Message) -> tuple[int, Any]:
        try:
            async with self._looking:
                return 200, await self._look(scope)
        except MiniRLError as error:
            return 503, _problem(str(error))


def _problem(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


async def _answer(status: int, content: Any, send: Send) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(content)})
