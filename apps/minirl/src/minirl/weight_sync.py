"""Publishing a new version of the weights: the part that both modes share."""

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import msgspec

from minirl.perturbation import PERTURBED, Perturbation, Proof
from minirl.replica_faults import faults_of, receiver_name
from minirl.rollout_manager import RolloutManager
from minirl.sync_record import Clock, Moved, Order, SyncRecord
from rl_core.errors import MiniRLError, VerificationError
from rl_core.interfaces import LoadReport
from rl_core.logs import kv
from rl_core.tensor_counts import TensorCounts
from rl_core.versions import PolicyVersion, VersionStore

if TYPE_CHECKING:
    from minirl.live_verification import LiveVerification

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


class WeightSync(ABC):
    """Publishes the actor's weights to every replica that is up, or to none.

    Two phases: every engine rank loads, and only when all have, and what they hold was verified
    where that is asked for, every replica commits. A failure fences all replicas. If the run is to
    go on without a replica that fails, and it can be told which one has, that one is given up, and
    the same version is published again to the others; until that is committed they stay fenced.

    Attributes:
        records: of all syncs so far.
        live: verifies what the engines hold; None where that is off.
        perturbation: proves that it would notice; None where that is off.
    """

    def __init__(
        self, rollout: RolloutManager, versions: VersionStore, settings: SyncSettings
    ) -> None:
        self.records: list[SyncRecord] = []
        self.live: LiveVerification | None = None
        self.perturbation: Perturbation | None = None
        self.settings = settings
        self.rollout = rollout
        self._versions = versions
        self._published: dict[str, str | None] = {}

    @abstractmethod
    def release(self) -> None:
        """Hand the engines' memory to the actor until the next sync, where they share devices."""

    @abstractmethod
    def transfer(self, order: Order, clock: Clock) -> Moved:
        """Get the weights into the engine ranks of the replicas that `RolloutManager.begin` named.

        The reports are of the ranks that loaded themselves.
        """

    @abstractmethod
    def close(self, clock: Clock, *, success: bool) -> None:
        """End what `transfer` began, when the version was committed or has failed."""

    def faults(self) -> dict[int, str]:
        """Replicas that the last `transfer` shows to be at fault for its failure, and why."""
        return {}

    def version_of(self, epoch: int, step: int) -> PolicyVersion:
        """The version that the weights after training step `step` are published as.

        Perturbed weights have versions, too, and come before the ones that they were made from.
        """
        return PolicyVersion(epoch, step if self.perturbation is None else 2 * step)

    def sync(self, version: PolicyVersion, phase: str) -> SyncRecord:
        """Publish the actor's present weights as `version`; `phase` is initial or trained."""
        replicas = self.rollout.up()
        proof = None
        if self.perturbation is not None and self.records:
            proof = self._prove(self.perturbation, version, replicas)
            replicas = [replica for replica in replicas if replica not in self.rollout.given_up]
        self._versions.record(version)
        return self._publish(version, phase, replicas, proof)

    def catch_up(self, version: PolicyVersion) -> SyncRecord | None:
        """Publish `version`, which is served, to replicas that came up since; None without any.

        The actor must still hold the weights that it was published from.
        """
        newcomers = self.rollout.newcomers()
        return self._publish(version, JOINING, newcomers) if newcomers else None

    def digest_of(self, version: PolicyVersion) -> str | None:
        """Digest of digests of a published version, if its transfer was verified."""
        for record in reversed(self.records):
            if record.version == str(version) and record.error is None:
                return record.weights_digest
        return self._published.get(str(version))

    def expect(self, version: PolicyVersion, digest: str | None) -> None:
        """`version` is to have this digest of digests: it was published by a run that died."""
        self._published[str(version)] = digest

    # ------------------------------------------------------------------ one sync

    def _prove(
        self, perturbation: Perturbation, version: PolicyVersion, replicas: list[int]
    ) -> Proof:
        """Load changed weights, verify that they are what the engines hold, change them back."""
        changed = PolicyVersion(version.epoch, version.step - 1)
        self._versions.record(changed)
        with perturbation.in_place(changed) as proof:
            self._publish(changed, PERTURBED, replicas, proof)
        return proof

    def _publish(
        self,
        version: PolicyVersion,
        phase: str,
        replicas: list[int],
        proof: Proof | None = None,
    ) -> SyncRecord:
        """The last attempt's record; each attempt gives up a replica, or is the last one."""
        repeats = None
        while True:
            record = SyncRecord(
                sync_index=len(self.records) + 1,
                phase=phase,
                version=str(version),
                backend=self.settings.checkpoint_engine,
                replicas=replicas,
                repeats=repeats,
            )
            failure = self._attempt(record, version, proof)
            if failure is None:
                return record
            self._go_on_without(record, failure)
            replicas = [replica for replica in replicas if replica not in record.given_up]
            if not replicas and self.rollout.up():
                return record  # it was for newcomers only, and the others serve
            if not replicas:
                raise failure
            repeats = record.sync_index

    def _attempt(
        self, record: SyncRecord, version: PolicyVersion, proof: Proof | None
    ) -> Exception | None:
        """Carry out a sync; the error of one that failed, with what it loaded fenced."""
        clock, failure = Clock(), None
        try:
            self._carry_out(record, version, clock, proof)
        except (MiniRLError, TimeoutError) as error:
            failure = error
            loaded = record.replicas if self.rollout.goes_on else None
            reason = f"sync of {version} failed: {error}"
            self.rollout.fence(reason, _FENCE_TIMEOUT_S, loaded)
            self._note_failure(record, error)
        self._keep(record, clock)
        return failure

    def _go_on_without(self, record: SyncRecord, failure: Exception) -> None:
        """Give up who failed. Errors: `failure`, if that is not to be or cannot be told."""
        if not self.rollout.goes_on:
            raise failure
        found = self.faults() or faults_of(failure, self.rollout.tp_size)
        for replica in record.replicas:
            why = found.get(replica) or self.rollout.dead(replica)
            if why is not None:
                record.given_up[replica] = why
        if not record.given_up:
            self.rollout.fence(f"sync of {record.version} failed: {failure}", _FENCE_TIMEOUT_S)
            _logger.error("which replica the sync failed at cannot be told: the run stops")
            raise failure
        for replica, why in record.given_up.items():
            self.rollout.give_up(replica, f"sync of {record.version} failed: {why}")

    def _keep(self, record: SyncRecord, clock: Clock) -> None:
        record.seconds = record.seconds or clock.total()
        record.phases = {**clock.seconds, **record.phases}
        self.records.append(record)

    def _carry_out(
        self, record: SyncRecord, version: PolicyVersion, clock: Clock, proof: Proof | None
    ) -> None:
        live = self.live if self._is_verified(record, proof) else None
        order = Order(version, record.sync_index, live is not None)
        self._announce(record, live=order.live)
        self.rollout.begin(version, record.replicas)
        success = False
        try:
            moved = self.transfer(order, clock)
            self._check_light(record, version, moved)
            if live is not None:
                self._check_live(live, record, moved, clock, proof)
            with clock.phase("commit"):
                self._conclude(record, version)
            success = True
        finally:
            self.close(clock, success=success)
        self._tell(record, moved.reports, clock)

    def _check_live(
        self,
        live: "LiveVerification",
        record: SyncRecord,
        moved: Moved,
        clock: Clock,
        proof: Proof | None,
    ) -> None:
        with clock.phase("verify_live"):
            ranks = live.verify(record, moved, PolicyVersion.parse(record.version))
        record.phases["expect_live"] = max(one.seconds for one in moved.expected)
        if proof is not None:
            record.perturbation = proof.check(record.phase, ranks)

    def _is_verified(self, record: SyncRecord, proof: Proof | None) -> bool:
        """Whether this sync is followed by a live verification; after a failure it always is."""
        if self.live is None:
            return False
        always = proof is not None or record.phase == JOINING or record.repeats is not None
        return always or self.live.due(record.sync_index)

    def _conclude(self, record: SyncRecord, version: PolicyVersion) -> None:
        """Let requests in; perturbed weights are never served."""
        if record.phase == PERTURBED:
            self.rollout.fence(f"{version} holds perturbed weights", _FENCE_TIMEOUT_S)
        else:
            self.rollout.commit(version, self.settings.timeout_s)

    def _check_light(self, record: SyncRecord, version: PolicyVersion, moved: Moved) -> None:
        reports = moved.reports
        record.payload_bytes = reports[0].nbytes
        record.phases = _slowest(reports)
        if self.settings.verify_light:
            record.light = msgspec.structs.asdict(_counted(reports))
            _check_verified(moved, self.digest_of(version))
            _logger.info("Light transfer verification passed: %s", kv(**record.light))

    def _note_failure(self, record: SyncRecord, error: Exception) -> None:
        """Of a failure in the middle of a transfer only the rank is known that it comes from."""
        record.error = f"{type(error).__name__}: {error}"
        record.payload_bytes = 0
        if self.settings.verify_light and record.light is None:
            known = error.counts if isinstance(error, MiniRLError) else None
            record.light = msgspec.structs.asdict(known or TensorCounts())

    # ------------------------------------------------------------------ log

    def _announce(self, record: SyncRecord, *, live: bool) -> None:
        skipped = {} if live or self.live is None else {"configured_verify_live_weights": True}
        _logger.info(
            "Weight sync started: %s",
            kv(
                sync_index=record.sync_index,
                phase=record.phase,
                mode=self.settings.mode,
                rollout_backend=self.rollout.name,
                checkpoint_engine=record.backend,
                version=record.version,
                verify_light_transfer=self.settings.verify_light,
                verify_live_weights=live,
                **skipped,
            ),
        )

    def _tell(self, record: SyncRecord, reports: list[LoadReport], clock: Clock) -> None:
        record.weights_digest = reports[0].weights_digest
        record.seconds = clock.total()
        _logger.info(
            "Weight sync finished: %s",
            kv(
                sync_index=record.sync_index,
                phase=record.phase,
                version=record.version,
                payload_bytes=record.payload_bytes,
                seconds=record.seconds,
                gb_per_s=record.payload_bytes / record.seconds / _GIGA,
            ),
        )


def _check_verified(moved: Moved, published: str | None) -> None:
    """Every rank must have recomputed every digest, and all must agree on the whole.

    Also with what was sent, if that is known, and with what was `published` under that version
    before, if it was.
    """
    reports = moved.reports
    digests = {report.weights_digest for report in reports}
    clean = all(report.counts.clean for report in reports)
    sent = {moved.digest} if moved.digest is not None else digests
    if not clean or None in digests or len(digests) != 1 or digests != sent:
        counts = [report.counts for report in reports]
        msg = f"light verification is incomplete, or ranks differ; by rank {counts}, {digests}"
        raise VerificationError(msg).blaming(_differing(moved))
    if published is not None and digests != {published}:
        msg = f"{reports[0].version} was published with digest {published}, now it has {digests}"
        raise VerificationError(msg)


def _differing(moved: Moved) -> str:
    """The first receiver whose report is not what was sent; empty where that cannot be told."""
    for rank, report in zip(moved.ranks, moved.reports, strict=False):
        other = moved.digest is not None and report.weights_digest != moved.digest
        if other or not report.counts.clean:
            return receiver_name(rank)
    return ""


def _counted(reports: list[LoadReport]) -> TensorCounts:
    """Tensors of all ranks together, by how their verification ended."""
    return sum((report.counts for report in reports), TensorCounts())


def _slowest(reports: list[LoadReport]) -> dict[str, float]:
    """Phases inside the engine ranks, the slowest rank's."""
    names = {name for report in reports for name in report.seconds}
    return {name: max(r.seconds.get(name, 0.0) for r in reports) for name in sorted(names)}
