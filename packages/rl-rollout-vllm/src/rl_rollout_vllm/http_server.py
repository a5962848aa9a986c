"""The OpenAI-compatible HTTP server of a replica, behind the serving gate."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from rl_core.gate import ServingGate
from rl_core.interfaces import LiveWeights
from rl_core.rollout.endable_app import EndableApp
from rl_core.rollout.gated_app import App, GatedApp
from rl_core.rollout.live_route import LiveRoute
from rl_rollout_vllm.engine_api import VllmEngine


class _Uvicorn(uvicorn.Server):  # type: ignore[misc]
    """A uvicorn server that leaves the signals of the process alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one engine on a free port of one interface."""

    def __init__(self, app: App, host: str) -> None:
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._app = EndableApp(app)
        config = uvicorn.Config(self._app, log_level="error", access_log=False, lifespan="off")
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        engine: VllmEngine,
        gate: ServingGate,
        host: str,
        look: Callable[[], Awaitable[LiveWeights]],
    ) -> "HttpServer":
        """Build vLLM's application around a running engine, and listen.

        Args:
            engine: answers the requests.
            gate: decides what is answered.
            host: interface to bind.
            look: what the engine holds, whatever the gate says.
        """
        options = _options(engine.args)
        client = engine.client
        tasks = await client.get_supported_tasks()
        app = build_app(options, tasks, client.model_config)
        await init_app_state(client, app.state, options, tasks)
        server = cls(LiveRoute(GatedApp(app, gate), lambda scope: look()), host)
        server._task = asyncio.create_task(server._server.serve(sockets=[server._socket]))
        return server

    def end(self, reason: str) -> None:
        """Answer 503 with `reason` to all that comes and all that waits, health checks included."""
        self._app.end(reason)

    async def stop(self) -> None:
        """Stop listening and end open connections. Idempotent."""
        self._server.should_exit = self._server.force_exit = True
        if self._task is not None:
            await self._task
            self._task = None
        self._socket.close()


def _options(args: dict[str, Any]) -> Any:
    """The command-line namespace that vLLM's application expects."""
    parser = make_arg_parser(FlexibleArgumentParser())
    options = parser.parse_args([])
    for key, value in args.items():
        if hasattr(options, key):
            setattr(options, key, value)
    return options
