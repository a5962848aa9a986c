"""Puts the serving gate in front of an ASGI application."""

import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rl_core.errors import ReplicaFencedError
from rl_core.gate import ServingGate

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/v1/models"})
"""Paths that are answered whatever the gate says: they compute nothing with the weights."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class GatedApp:
    """ASGI middleware: a request enters through the gate, or is refused with 503 and the reason.

    A streamed response counts as in flight until its last byte.
    """

    def __init__(self, app: App, gate: ServingGate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await refuse(scope, "", send)
            return
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._gate.admit())
            except ReplicaFencedError as error:
                await refuse(scope, str(error), send)
                return
            await self._app(scope, receive, send)


async def refuse(scope: Message, reason: str, send: Send) -> None:
    """Answer one connection with 503 and the reason, or close it if it is a websocket."""
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1013})
        return
    problem = {"message": reason, "type": "ReplicaFencedError", "code": 503}
    body = json.dumps({"error": problem}).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
