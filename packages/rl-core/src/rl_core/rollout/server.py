"""The server of one rollout replica: an engine, a serving gate, an HTTP address.

Created by a Launcher in a process of its own that runs an asyncio event loop; every method is
called through a Handle. A backend's subclass says how its engine is imported and started; the
engine is imported by `warm_up` or `start`, not before.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from rl_core.errors import ComponentError, LifecycleError, RolloutError, VerificationError
from rl_core.gate import ServingGate
from rl_core.interfaces import LiveContent, LiveWeights, LoadReport, PauseMode, Placement
from rl_core.logs import kv
from rl_core.metadata import Manifest
from rl_core.publish import Failed, Outdated, Phase
from rl_core.rollout.config import EngineConfig
from rl_core.rollout.early_completions import EarlyCompletions, Ended
from rl_core.rollout.engine import Engine
from rl_core.rollout.engine_memory import EngineMemory
from rl_core.rollout.pauses import Pauses
from rl_core.rollout.protocol import WEIGHTS, Offer
from rl_core.rollout.weight_updates import WeightUpdates
from rl_core.trajectory import Completion, GenerateRequest, samples_of
from rl_core.versions import PolicyVersion

logger = logging.getLogger(__name__)


class Http(Protocol):
    """A running HTTP server.

    Attributes:
        address: `host:port`.
    """

    address: str

    def end(self, reason: str) -> None:
        """Answer 503 with `reason` to all that comes and all that waits, health checks included."""
        ...

    async def stop(self) -> None:
        """Stop listening and end open connections. Idempotent."""
        ...


class RolloutServer(ABC):
    """One replica's server; see the module.

    Attributes:
        engine_name: how messages spell the engine.
    """

    engine_name: ClassVar[str]

    _engine: Engine
    _http: Http
    _pauses: Pauses
    _memory: EngineMemory
    _updates: WeightUpdates
    _watch: asyncio.Task[None]

    def __init__(self, config: EngineConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._gate = ServingGate(f"{self.engine_name} replica {placement.replica_rank}")
        self._scratch = ""
        self._running = False
        self._tokens_answered = 0
        self._early = EarlyCompletions()

    # -- what a backend says

    @abstractmethod
    def _import_engine(self) -> None:
        """Import everything of the engine that the server needs.

        Errors: ComponentNotFoundError naming the extra, ComponentLoadError.
        """

    @abstractmethod
    async def _start_engine(self, scratch: str) -> Engine:
        """Start the engine's processes; `scratch` is a directory for what goes with them."""

    @abstractmethod
    async def _start_http(self, engine: Engine, gate: ServingGate) -> Http:
        """Serve the engine's own HTTP interface behind the gate."""

    @abstractmethod
    def _route_logs(self) -> None:
        """Send what the engine logs in this process where the configuration says."""

    # -- life cycle

    async def warm_up(self) -> None:
        """Import the engine, so that `start` need not; errors are left to `start`."""
        with contextlib.suppress(ComponentError):
            await asyncio.to_thread(self._import_engine)

    async def start(self) -> str:
        """Start the engine and the HTTP server; its address, `host:port`.

        Errors: ComponentNotFoundError (the engine is not installed), ConfigError, LifecycleError.
        """
        if self._running:
            raise LifecycleError("the server was already started")
        self._scratch = tempfile.mkdtemp(prefix="rl-rollout-")
        self._route_logs()
        try:
            await asyncio.to_thread(self._import_engine)
            self._engine = engine = await self._start_engine(self._scratch)
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        self._running = True
        self._pauses = Pauses(engine, self._gate)
        self._memory = EngineMemory(engine, self._config.free_cache_engine)
        self._updates = WeightUpdates(
            engine, self._gate, self._pauses, self._memory, self._config.check_finite
        )
        self._http = await self._start_http(engine, self._gate)
        self._watch = asyncio.create_task(self._fence_at_the_end())
        logger.info("%s http server: %s", self.engine_name, self._described())
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
            self._watch.cancel()
            await self._http.stop()
            await self._engine.shutdown()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    # -- requests

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Complete all requests, in order; the samples of one (`sampling.n`) follow each other.

        Errors: ReplicaFencedError if the replica serves nothing at present, RolloutError if the
        engine fails.
        """
        self._check_running()
        samples = samples_of(requests)
        with self._gate.admit() as state, self._early.opened(samples) as ended:
            outputs = await asyncio.gather(
                *(self._complete(sample, state.committed, ended) for sample in samples),
                return_exceptions=True,
            )
        for output in outputs:
            if isinstance(output, BaseException):
                self._fence_if_dead()
                raise output
        return [output for output in outputs if isinstance(output, Completion)]

    async def _complete(
        self, request: GenerateRequest, committed: PolicyVersion | None, ended: Ended
    ) -> Completion:
        completion = await self._engine.generate(request, committed)
        self._tokens_answered += len(completion.token_ids)
        ended(completion)
        return completion

    async def finished(self, request_ids: Sequence[str], wait: float) -> list[Completion]:
        """Those of `generate` calls under way; see `SupportsEarlyCompletions`."""
        self._check_running()
        return await self._early.finished(request_ids, wait)

    async def tokens_made(self) -> int:
        """Tokens since the start, of all requests, also of those under way."""
        self._check_running()
        return self._tokens_answered + self._engine.tokens_underway()

    async def pause(self, mode: PauseMode, seconds: float) -> None:
        """Stop scheduling; see `Pauses.pause`."""
        self._check_running()
        await self._pauses.pause(PauseMode(mode), seconds)

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

    async def receive_directory(
        self, path: str, manifest: Manifest, seconds: float, on_update: PauseMode = PauseMode.ABORT
    ) -> LoadReport:
        """Load a directory into all ranks; see `WeightUpdates.receive_directory`."""
        self._check_running()
        return await self._updates.receive_directory(path, manifest, seconds, PauseMode(on_update))

    async def attempt(self) -> int:
        """The number of the update under way, or of the last one: what its commit carries."""
        return self._gate.state.attempt

    async def commit(self, version: PolicyVersion, attempt: int | None = None) -> None:
        """Serve `version`; see `WeightUpdates.commit`."""
        self._check_running()
        await self._updates.commit(version, attempt)

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
        """Abort requests in flight, refuse new ones, free memory; bytes by tag over all ranks.

        With its weights goes what was loaded and not committed: the replica is then fenced.
        """
        self._check_running()
        state = self._gate.state
        if state.serving:
            self._gate.apply(Outdated())
        elif WEIGHTS in tags and state.target is not None:
            reason = f"its weights were released before {state.target} was committed"
            self._gate.apply(Failed(reason))
        await self._pauses.abort()
        return await self._memory.release(tags)

    async def resume(self, tags: Sequence[str]) -> None:
        """Allocate again; weights come back empty."""
        self._check_running()
        await self._memory.resume(tags)

    # -- inspection

    async def live_digests(self) -> list[dict[str, str]]:
        """Digests of what the engine's ranks compute with, by run-time name, in rank order.

        Errors: LifecycleError while the weights are released, RolloutError.
        """
        self._check_present()
        return await self._engine.live_digests()

    async def live_weights(self) -> LiveWeights:
        """The same, with how the engine runs: what the HTTP server tells (`LiveRoute`)."""
        self._check_present()
        return await self._engine.live_weights()

    async def live_content(self, tp_rank: int, name: str, start: int) -> LiveContent:
        """A piece of what one rank computes with, by run-time name, from byte `start` on.

        Errors: as `live_digests`; VerificationError for a tensor that is not there.
        """
        self._check_present()
        found = await self._engine.live_content(tp_rank, name, start)
        if found is None:
            raise VerificationError(f"rank {tp_rank} of the engine has no tensor {name!r}")
        return found

    async def live_state(self) -> dict[str, Any]:
        """What the replica is doing and has: phase, requests in flight, processes, memory."""
        self._fence_if_dead()
        state = self._gate.state
        return {
            "phase": str(state.phase),
            "reason": state.reason,
            "in_flight": self._gate.in_flight,
            "pid": os.getpid(),
            "scratch": self._scratch,
            "workers": self._engine.workers if self._running else [],
            "released": sorted(self._memory.released) if self._running else [],
        }

    async def worker_call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension on every rank (tests and inspection)."""
        self._check_running()
        return await self._engine.call(method, *args)

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
            raise LifecycleError(f"the {self.engine_name} server is not running")

    def _check_present(self) -> None:
        self._check_running()
        if WEIGHTS in self._memory.released:
            raise LifecycleError("the weights are released: there is nothing to look at")

    async def _fence_at_the_end(self) -> None:
        """Whether or not somebody asks: HTTP clients would wait for a dead engine for ever."""
        await self._engine.ended()
        self._fence_if_dead()

    def _fence_if_dead(self) -> None:
        if not self._running or self._engine.alive:
            return
        words = self._engine.last_words
        said = f": {words}" if words else ""
        reason = f"its engine process died; restart the replica{said}"
        if self._gate.state.phase != Phase.FENCED:
            rank = self._placement.replica_rank
            logger.error("%s replica %d: %s", self.engine_name, rank, reason)
            self._gate.apply(Failed(reason))
        self._http.end(f"{self.engine_name} replica {self._placement.replica_rank}: {reason}")
