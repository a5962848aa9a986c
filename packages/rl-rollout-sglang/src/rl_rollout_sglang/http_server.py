"""SGLang's HTTP server (OpenAI-compatible and native), behind the serving gate."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from sglang.srt.entrypoints import http_server as sglang_http

from rl_core.errors import LifecycleError
from rl_core.gate import ServingGate
from rl_core.interfaces import LiveWeights
from rl_core.rollout.endable_app import EndableApp
from rl_core.rollout.gated_app import App, GatedApp, Message, Receive, Send
from rl_core.rollout.live_route import LiveRoute
from rl_rollout_sglang.engine_api import SglangEngine

SERVED = ("/v1/", "/generate", "/tokenize", "/detokenize", "/api/")
"""Beginnings of paths that ask the model something."""

OPEN = frozenset({"/health", "/ping", "/ready", "/model_info", "/get_model_info", "/v1/models"})
"""Paths that are answered whatever the gate says: they compute nothing with the weights."""

STOP_S = 1
"""Seconds for open connections to end by themselves."""
POLL_S = 0.01


class _Uvicorn(uvicorn.Server):  # type: ignore[misc]
    """A uvicorn server that leaves the signals of the process alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GuardedApp:
    """ASGI middleware: the model's paths through the gate, SGLang's control paths refused.

    These would change the engine's state behind the adapter's back, or end the engine (releasing
    memory while it is busy).
    """

    def __init__(self, app: App, gate: ServingGate) -> None:
        self._app = app
        self._gated = GatedApp(app, gate)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        path = scope.get("path", "")
        if scope["type"] == "lifespan" or path in OPEN:
            await self._app(scope, receive, send)
        elif path.startswith(SERVED):
            await self._gated(scope, receive, send)
        else:
            await _forbid(path, send)


class HttpServer:
    """Serves one engine on a free port of one interface."""

    def __init__(self, app: App, host: str) -> None:
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._app = EndableApp(app)
        config = uvicorn.Config(
            self._app,
            log_level="error",
            access_log=False,
            lifespan="on",  # which makes SGLang's handlers, and has to be ended orderly
            timeout_graceful_shutdown=STOP_S,
        )
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        engine: SglangEngine,
        gate: ServingGate,
        host: str,
        timeout_s: float,
        look: Callable[[], Awaitable[LiveWeights]],
    ) -> "HttpServer":
        """Put SGLang's application around a running engine, and listen.

        Args:
            engine: answers the requests.
            gate: decides what is answered.
            host: interface to bind.
            timeout_s: seconds for the application to come up.
            look: what the engine holds, whatever the gate says.

        Errors: LifecycleError if it does not, or ends.
        """
        engine.publish(sglang_http, gate.refusal)
        guarded = GuardedApp(sglang_http.app, gate)
        server = cls(LiveRoute(guarded, lambda scope: look()), host)
        server._task = asyncio.create_task(server._server.serve(sockets=[server._socket]))
        await server._listening(timeout_s)
        return server

    async def _listening(self, timeout_s: float) -> None:
        """Wait until uvicorn answers; it tells by a flag only."""
        end = time.monotonic() + timeout_s
        while not self._server.started:
            if self._task is not None and self._task.done():
                raise LifecycleError("SGLang's HTTP application ended as it came up; see the log")
            if time.monotonic() > end:
                msg = f"SGLang's HTTP application did not come up within {timeout_s:.0f} s"
                raise LifecycleError(f"{msg} (start_timeout_s)")
            await asyncio.sleep(POLL_S)

    def end(self, reason: str) -> None:
        """Answer 503 with `reason` to all that comes and all that waits, health checks included."""
        self._app.end(reason)

    async def stop(self) -> None:
        """Stop listening and end open connections. Idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
            self._task = None
        self._socket.close()


async def _forbid(path: str, send: Send) -> None:
    message = f"{path} is not served: the engine's state belongs to the rollout adapter"
    body = json.dumps({"error": {"message": message, "type": "forbidden", "code": 403}}).encode()
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
