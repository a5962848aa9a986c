"""The reference server: what a real rollout server does, around the reference engine."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rl_core.errors import (
    LifecycleError,
    MiniRLError,
    ReplicaFencedError,
    RolloutError,
    VerificationError,
)
from rl_core.gate import ServingGate
from rl_core.interfaces import LiveContent, PauseMode, Placement
from rl_core.metadata import Manifest, TensorMeta
from rl_core.publish import Begin, Commit, Failed, Phase, Received, Verified
from rl_core.rollout.early_completions import EarlyCompletions
from rl_core.rollout.live_digests import content_of
from rl_core.testing.reference_config import ReferenceConfig
from rl_core.testing.reference_engine import ReferenceEngine
from rl_core.testing.reference_http import Health
from rl_core.testing.reference_kv import KVRows
from rl_core.testing.reference_model import MAX_TOKENS, RankModel
from rl_core.testing.reference_update import Update
from rl_core.testing.weights_directory import load_weights
from rl_core.torch import from_bytes, meta_of
from rl_core.trajectory import Completion, GenerateRequest, samples_of
from rl_core.versions import PolicyVersion


class ReferenceServer:
    """One replica: a gate, an engine over `tp_size` shards, and its weight updates.

    Its methods are called through a `Handle`, on its event loop. What touches weights is
    synchronous, so that buckets are loaded in order; what waits is async.
    """

    rank_model: type[RankModel] = RankModel
    engine: type[ReferenceEngine] = ReferenceEngine
    kv_rows: type[KVRows] = KVRows
    update: type[Update] = Update
    early: type[EarlyCompletions] = EarlyCompletions

    def __init__(self, config: ReferenceConfig, placement: Placement) -> None:
        self._name = f"reference replica {placement.replica_rank}"
        self._host = placement.host
        self._gate = ServingGate(self._name)
        ranks = range(placement.tp_size)
        self._ranks = [self.rank_model(config.model, rank, placement.tp_size) for rank in ranks]
        self._kv = self.kv_rows(config.model, config.kv_rows, MAX_TOKENS)
        self._engine = self.engine(self._ranks, self._kv)
        self._update: Update | None = None
        self._quiet: asyncio.Task[None]
        self._health = Health(self._gate.refusal)
        self._task: asyncio.Task[None] | None = None
        self._early = self.early()

    async def start(self) -> str:
        """Begin to listen and to generate; the HTTP address, `host:port`."""
        self._task = asyncio.get_running_loop().create_task(self._engine.run())
        return await self._health.start(self._host)

    async def stop(self) -> None:
        """Answer nothing any more. Idempotent."""
        self.fence("the server was stopped")
        if self._task is not None:
            self._task.cancel()
        await self._health.stop()

    # -- requests

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Complete all requests, in order; ReplicaFencedError if nothing is served."""
        samples = samples_of(requests)
        with self._gate.admit(), self._early.opened(samples) as ended:
            if not self._kv.allocated:
                raise ReplicaFencedError(f"{self._name}: its KV cache is released; resume it")
            return await self._engine.generate(samples, ended)

    async def finished(self, request_ids: Sequence[str], wait: float) -> list[Completion]:
        """Those of `generate` calls under way that have ended."""
        return await self._early.finished(request_ids, wait)

    def tokens_made(self) -> int:
        """Tokens since the start, of all requests, also of those under way."""
        return self._engine.tokens_made

    async def pause(self, mode: PauseMode, limit_s: float) -> None:
        """Stop scheduling; new requests queue."""
        await self._engine.pause(mode, limit_s)

    async def continue_(self) -> None:
        """Go on after `pause`."""
        await self._engine.resume()

    def clear_kv_cache(self) -> None:
        """Drop all cached prefixes."""
        self._kv.flush()

    def committed_version(self) -> PolicyVersion | None:
        """The version that is served, None if none is."""
        state = self._gate.state
        return state.committed if state.serving else None

    # -- weights

    async def begin_update(
        self,
        rank: int,
        manifest: Manifest,
        on_update: PauseMode = PauseMode.ABORT,
        limit_s: float = 0.0,
    ) -> int:
        """Let one rank take part in an update; its number, which later messages carry.

        Requests in flight end or stay as the first rank's `on_update` says, within `limit_s`.
        A stale version or a second sender is refused before anything is touched.
        """
        if self._update is None:
            self._gate.apply(Begin(manifest.version))
            self._update = self.update(manifest, self._gate.state.attempt, self._ranks)
            quieten = self._engine.quieten(on_update, limit_s)
            self._quiet = asyncio.get_running_loop().create_task(quieten)
        update = self._update
        update.admit(rank, manifest)
        with self._fencing():
            await asyncio.shield(self._quiet)
            update.join(rank, manifest)
        return update.attempt

    def load(self, rank: int, attempt: int, parts: Sequence[tuple[TensorMeta, bytes]]) -> None:
        """Load whole tensors into one rank; they are in place when this returns."""
        update = self._current()
        with self._fencing():
            for meta, data in parts:
                raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                update.load(rank, attempt, meta, from_bytes(raw, meta))

    async def finish_update(self, rank: int, attempt: int, limit_s: float) -> None:
        """End one rank's stream and wait for the other ranks: the replica is then LOADED."""
        update = self._current()
        with self._fencing():
            update.require(rank, attempt)
            self._close(update, rank)
            await update.wait(rank, limit_s)

    async def load_directory(
        self,
        path: Path,
        manifest: Manifest,
        on_update: PauseMode = PauseMode.ABORT,
        limit_s: float = 0.0,
    ) -> None:
        """Load a weights directory into all ranks: the replica is then LOADED."""
        for model in self._ranks:
            attempt = await self.begin_update(model.tp_rank, manifest, on_update, limit_s)
        update = self._current()
        with self._fencing():
            for name, tensor in load_weights(path).items():
                for model in self._ranks:
                    update.load(model.tp_rank, attempt, meta_of(name, tensor), tensor)
            for model in self._ranks:
                self._close(update, model.tp_rank)

    async def commit(self, version: PolicyVersion) -> None:
        """Flush the KV cache and serve `version` from here on."""
        if not self._kv.allocated:
            raise LifecycleError(f"{self._name}: its KV cache is released; resume it first")
        if self._gate.state.phase is Phase.LOADED:
            self._gate.apply(Verified(version))
        self._gate.apply(Commit(version))
        await self._engine.serve(version)
        self._update = None

    def fence(self, reason: str) -> None:
        """Refuse all requests, with `reason`; those in flight are aborted."""
        self._gate.apply(Failed(reason))
        if self._update is not None:
            self._update.fail(reason)
            self._update = None
        self._engine.close()
        self._engine.abort()

    # -- memory

    def release(self, tags: Sequence[str]) -> dict[str, int]:
        """Free memory; the bytes freed, by tag."""
        _check_tags(tags)
        self._engine.abort()
        freed = {}
        if "kv_cache" in tags:
            freed["kv_cache"] = self._kv.release()
        if "weights" in tags:
            self.fence("its weights were released; sync it before it serves")
            freed["weights"] = sum(model.release() for model in self._ranks)
        return freed

    def resume(self, tags: Sequence[str]) -> None:
        """Allocate memory again; weights come back as NaN."""
        _check_tags(tags)
        if "kv_cache" in tags:
            self._kv.resume()
        if "weights" in tags:
            for model in self._ranks:
                model.resume()

    def live_digests(self) -> list[dict[str, str]]:
        """Digests of what is computed with, by run-time name, for each rank."""
        return [model.live_digests() for model in self._ranks]

    def live_content(self, tp_rank: int, name: str, start: int) -> LiveContent:
        """A piece of what one rank computes with, by run-time name, from byte `start` on."""
        found = content_of(self._ranks[tp_rank].live_tensors(), name, start)
        if found is None:
            raise VerificationError(f"rank {tp_rank} of the engine has no tensor {name!r}")
        return found

    def flip(self, rank: int, name: str, position: float) -> None:
        """Flip one bit of a live tensor of one rank."""
        self._ranks[rank].flip(name, position)

    def poison(self) -> None:
        """Overwrite everything that the ranks hold with NaN."""
        for model in self._ranks:
            for parameter in model.parameters.values():
                parameter.fill_(float("nan"))

    def _close(self, update: Update, rank: int) -> None:
        if update.close(rank):
            self._gate.apply(Received(update.manifest.version, update.attempt))

    def _current(self) -> Update:
        if self._update is None:
            raise LifecycleError(f"{self._name}: no update is under way")
        return self._update

    @contextmanager
    def _fencing(self) -> Iterator[None]:
        """Fence the replica if the block raises one of our errors."""
        try:
            yield
        except MiniRLError as error:
            self.fence(str(error))
            raise


def _check_tags(tags: Sequence[str]) -> None:
    unknown = set(tags) - {"kv_cache", "weights"}
    if unknown:
        raise RolloutError(f"unknown memory tags {sorted(unknown)}; known: kv_cache, weights")
