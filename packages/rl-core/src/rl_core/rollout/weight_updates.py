"""Carries a replica from one version to the next: receive, load on all ranks, commit or fence."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from rl_core.deadlines import Deadline
from rl_core.errors import (
    LifecycleError,
    MiniRLError,
    RolloutError,
    TransferError,
    TransferTimeoutError,
)
from rl_core.gate import ServingGate
from rl_core.interfaces import LoadReport, PauseMode
from rl_core.logs import kv
from rl_core.metadata import Manifest
from rl_core.publish import Begin, Commit, Failed, Phase, Received, Verified, advance
from rl_core.rollout.engine import Engine
from rl_core.rollout.engine_memory import EngineMemory
from rl_core.rollout.pauses import Pauses
from rl_core.rollout.protocol import (
    WEIGHTS,
    FromDirectory,
    FromSocket,
    Offer,
    Source,
    UpdateRequest,
    UpdateResult,
)
from rl_core.rollout.update_rendezvous import Rendezvous
from rl_core.versions import PolicyVersion

logger = logging.getLogger(__name__)

LATE_SHARE = 0.05
"""Share of an update's seconds by which engine ranks may be late to tell of their deadline."""


class WeightUpdates:
    """The one owner of a replica's weights. Runs in the server's event loop."""

    def __init__(
        self,
        engine: Engine,
        gate: ServingGate,
        pauses: Pauses,
        memory: EngineMemory,
        check_finite: bool,
    ) -> None:
        self._check_finite = check_finite
        self._engine = engine
        self._gate = gate
        self._pauses = pauses
        self._memory = memory
        self._update: Rendezvous | None = None

    async def receive(self, offer: Offer) -> LoadReport:
        """Take part in an update with one rank; returns when all ranks have loaded.

        Errors: StaleVersionError and LifecycleError leave the replica as it was; any other
        WeightSyncError or VerificationError leaves it FENCED.
        """
        update = self._update
        if update is None:
            self._gate.apply(Begin(offer.manifest.version))
            update = self._update = Rendezvous(offer, len(self._engine.workers), self._load_offers)
        else:
            update.check(offer)
        attempt = self._gate.state.attempt
        try:
            return await update.join(offer)
        except MiniRLError as error:
            await self._fail(attempt, error)
            raise
        finally:
            if self._update is update:
                self._update = None

    async def receive_directory(
        self, path: str, manifest: Manifest, seconds: float, on_update: PauseMode
    ) -> LoadReport:
        """Load a Hugging Face directory into all ranks. Errors as in `receive`."""
        if self._update is not None:
            raise LifecycleError(f"version {self._update.version} is being loaded")
        self._gate.apply(Begin(manifest.version))
        attempt = self._gate.state.attempt
        try:
            sources = [FromDirectory(path)] * len(self._engine.workers)
            reports = await self._load(sources, manifest, seconds, on_update)
        except MiniRLError as error:
            await self._fail(attempt, error)
            raise
        return reports[0]

    async def commit(self, version: PolicyVersion, attempt: int | None = None) -> None:
        """Flush the KV cache, stamp tokens with `version`, let requests in.

        A commit that comes late or twice, or is of another attempt than the present one, is refused
        before it touches the engine: requests may be in flight, whose tokens another version
        stamps, and what was loaded since may not be verified.

        Errors: LifecycleError or StaleVersionError if `version` is not what was loaded, or memory
        is still released; RolloutError if the flush was not confirmed (the replica is then
        FENCED).
        """
        if self._memory.released:
            missing = ", ".join(sorted(self._memory.released))
            raise LifecycleError(f"cannot commit {version}: resume {missing} first")
        if self._gate.state.phase is Phase.LOADED:
            self._gate.apply(Verified(version, attempt))
        present, engine = self._gate.state.attempt, self._engine
        commit = Commit(version, present if attempt is None else attempt)
        try:
            for step in (engine.clear_kv_cache, engine.zero_kv_cache):
                advance(self._gate.state, commit)  # it may have changed meanwhile
                await step()
            advance(self._gate.state, commit)
            await engine.set_version(str(version))
        except RolloutError as error:
            await self._fail(present, error)
            raise
        self._gate.apply(commit)
        await self._pauses.end_update()

    async def _load_offers(self, offers: Sequence[Offer]) -> list[LoadReport]:
        sources = [FromSocket(offer.address, offer.key) for offer in offers]
        seconds = min(offer.seconds for offer in offers)
        return await self._load(sources, offers[0].manifest, seconds, offers[0].on_update)

    async def _load(
        self, sources: Sequence[Source], manifest: Manifest, seconds: float, on_update: PauseMode
    ) -> list[LoadReport]:
        attempt = self._gate.state.attempt
        if WEIGHTS in self._memory.released:
            raise LifecycleError("the weights are released; resume them before an update")
        deadline = Deadline.after(seconds)
        await self._pauses.begin_update(on_update, seconds)
        path, finite = self._engine.load_path, self._check_finite
        left = deadline.remaining()
        requests = [UpdateRequest(item, manifest, left, path, finite) for item in sources]
        reports = await _within(left, self._call_workers(requests), manifest.version)
        self._gate.apply(Received(manifest.version, attempt))
        logger.info("weights loaded: %s", _rendered(reports, path))
        return reports

    async def _call_workers(self, requests: Sequence[UpdateRequest]) -> list[LoadReport]:
        """Run one update on all ranks; the first rank's error if any failed."""
        encoded = [msgspec.msgpack.encode(request) for request in requests]
        try:
            answers = await self._engine.update(encoded)
        except RolloutError as error:
            raise TransferError(f"the engine failed during an update: {error}") from error
        reports = []
        for answer in answers:
            result = msgspec.msgpack.decode(answer, type=UpdateResult)
            if result.error is not None:
                raise result.error.rebuild()
            if result.report is not None:
                reports.append(result.report)
        return reports

    async def _fail(self, attempt: int, error: MiniRLError) -> None:
        """Fence the replica, unless another update has begun since; nobody is kept waiting."""
        if self._gate.state.attempt == attempt:
            self._gate.apply(Failed(f"{type(error).__name__}: {error}"))
            await self._pauses.end_requests()


async def _within(
    seconds: float, loading: Coroutine[Any, Any, list[LoadReport]], version: PolicyVersion
) -> list[LoadReport]:
    """The reports, or TransferTimeoutError if the engine's ranks say nothing, not even that.

    They have a deadline of their own, and name the cause. A call that is late is left to end by
    itself: what it says then belongs to an attempt that is over.
    """
    task = asyncio.ensure_future(loading)
    await asyncio.wait({task}, timeout=seconds * (1 + LATE_SHARE))
    if task.done():
        return task.result()
    task.add_done_callback(lambda late: late.cancelled() or late.exception())
    raise TransferTimeoutError(f"deadline passed while loading {version}: the engine hangs")


def _rendered(reports: Sequence[LoadReport], path: str) -> str:
    first = reports[0]
    return kv(
        version=first.version,
        load_path=path,
        ranks=len(reports),
        tensors=first.tensors,
        payload_bytes=first.nbytes,
        matched=first.matched,
        seconds=first.seconds,
    )
