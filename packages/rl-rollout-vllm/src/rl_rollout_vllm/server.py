"""The server of one rollout replica: an engine, a serving gate, an HTTP address.

Created by a Launcher in a process of its own that runs an asyncio event loop; every method is
called through a Handle. vLLM is imported by `start`, not before.
"""

import asyncio
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import (
    ComponentLoadError,
    ComponentNotFoundError,
    LifecycleError,
    RolloutError,
)
from rl_core.gate import ServingGate
from rl_core.interfaces import LoadReport, PauseMode, Placement
from rl_core.logs import kv
from rl_core.metadata import Manifest
from rl_core.publish import Failed, Outdated, Phase
from rl_core.trajectory import Completion, GenerateRequest
from rl_core.versions import PolicyVersion
from rl_rollout_vllm.config import VllmConfig
from rl_rollout_vllm.protocol import Offer
from rl_rollout_vllm.trajectories import completion_of

if TYPE_CHECKING:
    from rl_rollout_vllm.engine_api import Engine
    from rl_rollout_vllm.engine_memory import EngineMemory
    from rl_rollout_vllm.http_server import HttpServer
    from rl_rollout_vllm.pauses import Pauses
    from rl_rollout_vllm.weight_updates import WeightUpdates

logger = logging.getLogger(__name__)


class VllmServer:
    """One replica's server; see the module."""

    _engine: "Engine"
    _http: "HttpServer"
    _pauses: "Pauses"
    _memory: "EngineMemory"
    _updates: "WeightUpdates"

    def __init__(self, config: VllmConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._gate = ServingGate(f"vLLM replica {placement.replica_rank}")
        self._scratch = ""
        self._running = False

    # -- life cycle

    async def start(self) -> str:
        """Start the engine and the HTTP server; its address, `host:port`.

        Errors: ComponentNotFoundError (vLLM is not installed), ConfigError, LifecycleError.
        """
        self._prepare()
        await asyncio.to_thread(_import_engine)
        from rl_rollout_vllm.engine_api import Engine
        from rl_rollout_vllm.engine_memory import EngineMemory
        from rl_rollout_vllm.http_server import HttpServer
        from rl_rollout_vllm.pauses import Pauses
        from rl_rollout_vllm.weight_updates import WeightUpdates

        config, placement = self._config, self._placement
        self._engine = engine = await Engine.start(config, placement, self._scratch)
        self._running = True
        self._pauses = Pauses(engine)
        self._memory = EngineMemory(engine, placement.device, config.free_cache_engine)
        self._updates = WeightUpdates(config, engine, self._gate, self._pauses, self._memory)
        self._http = await HttpServer.start(engine, self._gate, placement.host)
        logger.info("vLLM http server: %s", self._described())
        return self._http.address

    async def address(self) -> str:
        """`host:port` of the HTTP server; LifecycleError before it is up."""
        self._check_running()
        return self._http.address

    async def shutdown(self) -> None:
        """End the HTTP server, the engine and its processes. Idempotent."""
        self._gate.apply(Failed("it was shut down"))
        if self._running:
            self._running = False
            await self._http.stop()
            await asyncio.to_thread(self._engine.shutdown)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    # -- requests

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Complete all requests, in order.

        Errors: ReplicaFencedError if the replica serves nothing at present, RolloutError if the
        engine fails.
        """
        self._check_running()
        with self._gate.admit() as state:
            version = state.committed
            outputs = await asyncio.gather(
                *(self._engine.generate(request) for request in requests), return_exceptions=True
            )
        for output in outputs:
            if isinstance(output, BaseException):
                self._fence_if_dead()
                raise output
        return [
            completion_of(request.request_id, output, version)
            for request, output in zip(requests, outputs, strict=True)
        ]

    async def pause(self, mode: PauseMode) -> None:
        """Stop scheduling; requests in flight end or stay as `mode` says, new ones queue."""
        self._check_running()
        await self._pauses.pause(PauseMode(mode))

    async def continue_(self) -> None:
        """Go on after `pause`."""
        self._check_running()
        await self._pauses.continue_()

    async def clear_kv_cache(self) -> None:
        """Drop cached prefixes; RolloutError unless the engine confirms it."""
        self._check_running()
        await self._engine.clear_kv_cache()

    # -- weights

    async def receive_update(self, offer: Offer) -> LoadReport:
        """Load one rank's stream; see `WeightUpdates.receive`."""
        self._check_running()
        return await self._updates.receive(offer)

    async def receive_directory(self, path: str, manifest: Manifest, seconds: float) -> LoadReport:
        """Load a directory into all ranks; see `WeightUpdates.receive_directory`."""
        self._check_running()
        return await self._updates.receive_directory(path, manifest, seconds)

    async def commit(self, version: PolicyVersion) -> None:
        """Serve `version`; see `WeightUpdates.commit`."""
        self._check_running()
        await self._updates.commit(version)

    async def fence(self, reason: str) -> None:
        """Refuse all requests, and end those in flight, until the next commit."""
        self._gate.apply(Failed(reason))
        if self._running:
            try:
                await self._pauses.abort()
            except RolloutError as error:
                logger.warning("fenced, but requests in flight could not be ended: %s", error)

    async def committed_version(self) -> PolicyVersion | None:
        """The version that is being served, or None."""
        self._fence_if_dead()
        state = self._gate.state
        return state.committed if state.serving else None

    # -- memory

    async def release(self, tags: Sequence[str]) -> dict[str, int]:
        """Abort requests in flight, refuse new ones, free memory; bytes by tag over all ranks."""
        self._check_running()
        if self._gate.state.serving:
            self._gate.apply(Outdated())
        await self._pauses.abort()
        return await self._memory.release(tags)

    async def resume(self, tags: Sequence[str]) -> None:
        """Allocate again; weights come back empty."""
        self._check_running()
        await self._memory.resume(tags)

    # -- inspection

    async def live_state(self) -> dict[str, Any]:
        """What the replica is doing: phase, reason, requests in flight, worker processes."""
        self._fence_if_dead()
        state = self._gate.state
        return {
            "phase": str(state.phase),
            "reason": state.reason,
            "in_flight": self._gate.in_flight,
            "pid": os.getpid(),
            "workers": self._engine.workers if self._running else [],
            "released": sorted(self._memory.released) if self._running else [],
        }

    async def worker_call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension on every rank (tests and inspection)."""
        self._check_running()
        return await self._engine.rpc(method, *args)

    def _prepare(self) -> None:
        if self._running:
            raise LifecycleError("the server was already started")
        self._scratch = tempfile.mkdtemp(prefix="rl-rollout-vllm-")
        os.environ["VLLM_RPC_BASE_PATH"] = self._scratch
        if self._config.log_dir is not None:
            _log_to_file(Path(self._config.log_dir), self._placement, self._config.log_level)

    def _described(self) -> str:
        placement = self._placement
        return kv(
            rollout_mode=placement.mode,
            replica_rank=placement.replica_rank,
            node_rank=placement.node_rank,
            nnodes=placement.nnodes,
            visible_devices=placement.visible_devices or placement.device,
            address=self._http.address,
        )

    def _check_running(self) -> None:
        if not self._running:
            raise LifecycleError("the vLLM server is not running")

    def _fence_if_dead(self) -> None:
        if self._running and not self._engine.alive and self._gate.state.phase != Phase.FENCED:
            self._gate.apply(Failed("its engine process died; restart the replica"))


def _import_engine() -> None:
    """Import everything of vLLM that the server needs, with our errors.

    Errors: ComponentNotFoundError naming the extra, ComponentLoadError.
    """
    if importlib.util.find_spec("vllm") is None:
        msg = "vLLM is not installed: pip install 'rl-rollout-vllm[cpu]' (or [cuda])"
        raise ComponentNotFoundError(msg)
    try:
        importlib.import_module("rl_rollout_vllm.engine_api")
        importlib.import_module("rl_rollout_vllm.http_server")
    except ImportError as error:
        msg = f"vLLM is installed but could not be imported: {error}"
        raise ComponentLoadError(msg) from error


def _log_to_file(directory: Path, placement: Placement, level: str) -> None:
    """Send vLLM's log of this process to a file instead of stdout."""
    directory.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(directory / f"vllm-{placement.replica_rank}-server.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log = logging.getLogger("vllm")
    log.setLevel(level)
    log.addHandler(handler)
    log.propagate = False
