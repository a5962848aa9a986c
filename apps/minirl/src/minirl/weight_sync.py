"""Getting a new version of the weights from the actor into the rollout engines."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from minirl.rollout_manager import RolloutManager
from minirl.worker_group import WorkerGroup
from rl_core.errors import MiniRLError, VerificationError
from rl_core.interfaces import LoadReport
from rl_core.logs import kv
from rl_core.versions import PolicyVersion, VersionStore

_logger = logging.getLogger(__name__)

KV_CACHE = "kv_cache"
WEIGHTS = "weights"
_MEGA = 1e9


class SyncRecord(msgspec.Struct):
    """One weight sync, as `summary.json` shows it.

    `light` and `live` hold the counts of a verification, or None where it was off.
    """

    sync_index: int
    phase: str
    version: str
    backend: str
    payload_bytes: int
    seconds: float
    phases: dict[str, float]
    weights_digest: str | None = None
    light: dict[str, int] | None = None
    live: dict[str, int] | None = None


class FusedWeightSync:
    """The fused sync: each actor rank streams into the engine rank on its own device.

    Publishing is two-phase: every engine rank loads, and only when all have, every replica
    commits. A failure before that fences all replicas.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        rollout: RolloutManager,
        versions: VersionStore,
        settings: "SyncSettings",
    ) -> None:
        self._workers = workers
        self._rollout = rollout
        self._versions = versions
        self._settings = settings
        self._released = False
        self.records: list[SyncRecord] = []

    def release(self) -> None:
        """Hand the engines' memory to the actor; the replicas answer nothing until `sync`."""
        if self._settings.free_cache_engine and not self._released:
            index = len(self.records) + 1
            freed = self._rollout.release((KV_CACHE, WEIGHTS), self._settings.timeout_s)
            self._released = True
            _logger.info(
                "Fused weight sync: release rollout memory before sync_index=%d, %s",
                index,
                kv(**{f"freed_{tag}_bytes": nbytes for tag, nbytes in freed.items()}),
            )

    def sync(self, version: PolicyVersion, phase: str) -> SyncRecord:
        """Publish the actor's present weights as `version`; `phase` is initial or trained."""
        index = len(self.records) + 1
        self._versions.record(version)
        self._announce(index, version, phase)
        clock = _Clock()
        try:
            with clock.phase("release"):
                self.release()
            with clock.phase("resume"):
                self._resume(WEIGHTS, index)
            with clock.phase("transfer"):
                reports = self._stream(version)
            with clock.phase("resume"):
                self._resume(KV_CACHE, index)
            with clock.phase("commit"):
                self._rollout.commit(version, self._settings.timeout_s)
        except (MiniRLError, TimeoutError) as error:
            self._rollout.fence(f"sync of {version} failed: {error}", 5.0)
            raise
        self._released = False
        record = self._record(index, version, phase, reports, clock)
        self.records.append(record)
        return record

    def digest_of(self, version: PolicyVersion) -> str | None:
        """Digest of digests of a published version, if its transfer was verified."""
        for record in reversed(self.records):
            if record.version == str(version):
                return record.weights_digest
        return None

    def _resume(self, tag: str, index: int) -> None:
        if self._released:
            self._rollout.resume((tag,), self._settings.timeout_s)
            if tag == WEIGHTS:
                _logger.info("Fused weight sync: resume rollout weights for sync_index=%d", index)

    def _stream(self, version: PolicyVersion) -> list[LoadReport]:
        settings = self._settings
        answers = self._workers.call(
            "sync_weights",
            version,
            settings.run_id,
            settings.timeout_s,
            settings.verify_light,
            timeout_s=settings.timeout_s + 10,
        )
        reports = [report for report in answers if report is not None]
        if settings.verify_light:
            _check_verified(reports)
        return reports

    def _announce(self, index: int, version: PolicyVersion, phase: str) -> None:
        _logger.info(
            "Weight sync started: %s",
            kv(
                sync_index=index,
                phase=phase,
                mode="fused",
                rollout_backend=self._rollout.name,
                checkpoint_engine="fused/in-process",
                version=version,
                verify_light_transfer=self._settings.verify_light,
                verify_live_weights=False,
            ),
        )

    def _record(
        self,
        index: int,
        version: PolicyVersion,
        phase: str,
        reports: list[LoadReport],
        clock: "_Clock",
    ) -> SyncRecord:
        seconds = clock.total()
        nbytes = reports[0].nbytes
        light = None
        if self._settings.verify_light:
            light = {
                "matched": sum(report.matched for report in reports),
                **dict.fromkeys(("mismatched", "missing", "unexpected", "unverifiable"), 0),
            }
            _logger.info("Light transfer verification passed: %s", kv(**light))
        _logger.info(
            "Weight sync finished: %s",
            kv(
                sync_index=index,
                phase=phase,
                version=version,
                payload_bytes=nbytes,
                seconds=seconds,
                gb_per_s=nbytes / seconds / _MEGA,
            ),
        )
        phases = {**clock.seconds, **_slowest(reports)}
        return SyncRecord(
            sync_index=index,
            phase=phase,
            version=str(version),
            backend="fused/in-process",
            payload_bytes=nbytes,
            seconds=seconds,
            phases=phases,
            weights_digest=reports[0].weights_digest,
            light=light,
        )


class SyncSettings(msgspec.Struct, frozen=True):
    """What a sync needs to know of the configuration."""

    run_id: str
    timeout_s: float
    free_cache_engine: bool
    verify_light: bool


class _Clock:
    """Seconds by phase of one sync."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + took

    def total(self) -> float:
        return time.perf_counter() - self._begin


def _check_verified(reports: list[LoadReport]) -> None:
    """Every rank must have recomputed every digest, and all must agree on the whole."""
    digests = {report.weights_digest for report in reports}
    short = [report for report in reports if report.matched != report.tensors]
    if short or None in digests or len(digests) != 1:
        counts: Any = [(report.matched, report.tensors) for report in reports]
        msg = f"light verification is incomplete: (matched, tensors) by rank {counts}"
        raise VerificationError(msg)


def _slowest(reports: list[LoadReport]) -> dict[str, float]:
    """Phases inside the engine ranks, the slowest rank's."""
    names = {name for report in reports for name in report.seconds}
    return {name: max(r.seconds.get(name, 0.0) for r in reports) for name in sorted(names)}
