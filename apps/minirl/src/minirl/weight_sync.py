"""Publishing a new version of the weights: the part that both modes share."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from minirl.rollout_manager import RolloutManager
from rl_core.errors import MiniRLError, VerificationError
from rl_core.interfaces import LoadReport
from rl_core.logs import kv
from rl_core.tensor_counts import TensorCounts
from rl_core.versions import PolicyVersion, VersionStore

_logger = logging.getLogger(__name__)

_GIGA = 1e9
_FENCE_TIMEOUT_S = 5.0

JOINING = "joining"
"""Phase of a sync that only brings late replicas up to date."""


class SyncSettings(msgspec.Struct, frozen=True):
    """What a sync needs to know of the configuration.

    Attributes:
        run_id: of the run; part of every manifest.
        mode: `fused` or `separate`.
        checkpoint_engine: how the log names the way that the weights take.
        timeout_s: deadline of one sync.
        free_cache_engine: free the engines' memory between `release` and `sync` (fused).
        verify_light: digests travel with the tensors and are recomputed before loading.
    """

    run_id: str
    mode: str
    checkpoint_engine: str
    timeout_s: float
    free_cache_engine: bool
    verify_light: bool


class SyncRecord(msgspec.Struct):
    """One weight sync, as `summary.json` shows it, whether it published its version or failed.

    `light` and `live` hold the counts of a verification, or None where it was off; `replicas` the
    numbers of those that took part. `error` is the failure, or None for a version that was
    published; the counts of a failed sync are those known when it ended.
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
    replicas: list[int] = []
    error: str | None = None


class WeightSync(ABC):
    """Publishes the actor's weights to every replica that is up, or to none.

    Two phases: every engine rank loads, and only when all have, every replica commits. A failure
    before that fences all replicas.
    """

    def __init__(
        self, rollout: RolloutManager, versions: VersionStore, settings: SyncSettings
    ) -> None:
        self.records: list[SyncRecord] = []
        self.settings = settings
        self.rollout = rollout
        self._versions = versions

    @abstractmethod
    def release(self) -> None:
        """Hand the engines' memory to the actor until the next sync, where they share devices."""

    @abstractmethod
    def transfer(self, version: PolicyVersion, index: int, clock: "Clock") -> list[LoadReport]:
        """Get the weights into the engine ranks of the replicas that `RolloutManager.begin` named.

        The reports are of the ranks that loaded themselves.
        """

    def sync(self, version: PolicyVersion, phase: str) -> SyncRecord:
        """Publish the actor's present weights as `version`; `phase` is initial or trained."""
        replicas = self.rollout.up()
        self._versions.record(version)
        return self._publish(version, phase, replicas)

    def catch_up(self, version: PolicyVersion) -> SyncRecord | None:
        """Publish `version`, which is served, to replicas that came up since; None without any.

        The actor must still hold the weights that it was published from.
        """
        newcomers = self.rollout.newcomers()
        return self._publish(version, JOINING, newcomers) if newcomers else None

    def _publish(self, version: PolicyVersion, phase: str, replicas: list[int]) -> SyncRecord:
        index = len(self.records) + 1
        self._announce(index, version, phase)
        clock = Clock()
        reports: list[LoadReport] = []
        try:
            self.rollout.begin(version, replicas)
            reports = self.transfer(version, index, clock)
            if self.settings.verify_light:
                _check_verified(reports, self.digest_of(version))
            with clock.phase("commit"):
                self.rollout.commit(version, self.settings.timeout_s)
        except (MiniRLError, TimeoutError) as error:
            self.rollout.fence(f"sync of {version} failed: {error}", _FENCE_TIMEOUT_S)
            record = self._failed(index, version, phase, error, _counted(reports))
            record.seconds, record.phases, record.replicas = clock.total(), clock.seconds, replicas
            self.records.append(record)
            raise
        record = self._record(index, version, phase, reports, clock)
        record.replicas = replicas
        self.records.append(record)
        return record

    def digest_of(self, version: PolicyVersion) -> str | None:
        """Digest of digests of a published version, if its transfer was verified."""
        for record in reversed(self.records):
            if record.version == str(version) and record.error is None:
                return record.weights_digest
        return None

    def _announce(self, index: int, version: PolicyVersion, phase: str) -> None:
        _logger.info(
            "Weight sync started: %s",
            kv(
                sync_index=index,
                phase=phase,
                mode=self.settings.mode,
                rollout_backend=self.rollout.name,
                checkpoint_engine=self.settings.checkpoint_engine,
                version=version,
                verify_light_transfer=self.settings.verify_light,
                verify_live_weights=False,
            ),
        )

    def _record(
        self,
        index: int,
        version: PolicyVersion,
        phase: str,
        reports: list[LoadReport],
        clock: "Clock",
    ) -> SyncRecord:
        seconds = clock.total()
        nbytes = reports[0].nbytes
        light = None
        if self.settings.verify_light:
            light = msgspec.structs.asdict(_counted(reports))
            _logger.info("Light transfer verification passed: %s", kv(**light))
        _logger.info(
            "Weight sync finished: %s",
            kv(
                sync_index=index,
                phase=phase,
                version=version,
                payload_bytes=nbytes,
                seconds=seconds,
                gb_per_s=nbytes / seconds / _GIGA,
            ),
        )
        phases = {**clock.seconds, **_slowest(reports)}
        return SyncRecord(
            sync_index=index,
            phase=phase,
            version=str(version),
            backend=self.settings.checkpoint_engine,
            payload_bytes=nbytes,
            seconds=seconds,
            phases=phases,
            weights_digest=reports[0].weights_digest,
            light=light,
        )

    def _failed(
        self,
        index: int,
        version: PolicyVersion,
        phase: str,
        error: Exception,
        loaded: TensorCounts,
    ) -> SyncRecord:
        """The record of a sync that published nothing, with the tensors `loaded` before it failed.

        Of a failure in the middle of a transfer only the rank is known that the error comes from.
        """
        known = error.counts if isinstance(error, MiniRLError) else None
        counts = loaded | (known or TensorCounts())
        return SyncRecord(
            sync_index=index,
            phase=phase,
            version=str(version),
            backend=self.settings.checkpoint_engine,
            payload_bytes=0,
            seconds=0.0,
            phases={},
            light=msgspec.structs.asdict(counts) if self.settings.verify_light else None,
            error=f"{type(error).__name__}: {error}",
        )


class Clock:
    """Seconds by phase of one sync."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Account the block to phase `name`; the same one may come more than once."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + took

    def total(self) -> float:
        """Seconds since the sync began."""
        return time.perf_counter() - self._begin


def _check_verified(reports: list[LoadReport], published: str | None) -> None:
    """Every rank must have recomputed every digest, and all must agree on the whole.

    Also with what was `published` under that version before, if it was.
    """
    digests = {report.weights_digest for report in reports}
    clean = all(report.counts.clean for report in reports)
    if not clean or None in digests or len(digests) != 1:
        counts = [report.counts for report in reports]
        msg = f"light verification is incomplete, or ranks differ; by rank {counts}, {digests}"
        raise VerificationError(msg)
    if published is not None and digests != {published}:
        msg = f"{reports[0].version} was published with digest {published}, now it has {digests}"
        raise VerificationError(msg)


def _counted(reports: list[LoadReport]) -> TensorCounts:
    """Tensors of all ranks together, by how their verification ended."""
    return sum((report.counts for report in reports), TensorCounts())


def _slowest(reports: list[LoadReport]) -> dict[str, float]:
    """Phases inside the engine ranks, the slowest rank's."""
    names = {name for report in reports for name in report.seconds}
    return {name: max(r.seconds.get(name, 0.0) for r in reports) for name in sorted(names)}
