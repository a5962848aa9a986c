"""Publishing a new version of the weights: the part that both modes share."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from minirl.light_check import check_verified, counted, slowest
from minirl.perturbation import PERTURBED, Perturbation, Proof
from minirl.replica_faults import faults_of
from minirl.rollout_manager import RolloutManager
from minirl.sync_log import tell_finished, tell_started
from minirl.sync_record import (
    RESTORED,
    Clock,
    Moved,
    Order,
    SyncRecord,
    last_published,
)
from minirl.sync_settings import SyncSettings
from rl_core.errors import LifecycleError, MiniRLError, VerificationError, in_one_line
from rl_core.logs import kv
from rl_core.tensor_counts import TensorCounts
from rl_core.versions import PolicyVersion, VersionStore

if TYPE_CHECKING:
    from minirl.live_member import Expected
    from minirl.live_verification import LiveVerification

_logger = logging.getLogger(__name__)

_FENCE_TIMEOUT_S = 5.0

TRAINED = "trained"
"""Phase of a sync that publishes what a training step has made."""
JOINING = "joining"
"""Phase of a sync that only brings late replicas up to date."""


class WeightSync(ABC):
    """Publishes the actor's weights to every replica that is up, or to none.

    Two phases: every engine rank loads, and only when all have, and what they hold was verified
    where that is asked for, every replica commits. A failure fences all replicas. If the run is to
    go on without a replica that fails, and it can be told which one has, that one is given up, and
    the same version is published again to the others; until that is committed they stay fenced. If
    that cannot be told, the version before is put back, where the checkpoint engine keeps it.

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
        self._expected: Sequence[Expected] = ()
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

    def transfer_kept(self, order: Order, clock: Clock) -> Moved:
        """As `transfer`, of a version that was published before, from what is kept of it.

        Errors: LifecycleError if nothing is.
        """
        del clock
        raise LifecycleError(f"nothing is kept of {order.version}")

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
        """Publish the actor's present weights as `version`; `phase` is initial or trained.

        The record has an error if `version` was not published and the one before is served on.
        """
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
            if not self._gave_up(record, failure):
                self._put_back(record, failure)
                return record
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
            self._note_failure(record, error)
            self._fence(record, error, record.replicas if self.rollout.goes_on else None)
        except Exception as error:
            # A defect of ours: nothing is known of what it left, so nobody answers.
            self._note_failure(record, error)
            self._fence(record, error)
            raise
        except BaseException as error:  # the run is ended, and with it the replicas
            self._note_failure(record, error)
            raise
        finally:
            self._keep(record, clock)
        return failure

    def _fence(
        self, record: SyncRecord, error: Exception, replicas: Sequence[int] | None = None
    ) -> None:
        reason = f"sync of {record.version} failed: {error}"
        self.rollout.fence(reason, _FENCE_TIMEOUT_S, replicas)

    def _gave_up(self, record: SyncRecord, failure: Exception) -> bool:
        """Do without who failed; False if that cannot be told. Errors: `failure`, if not to be."""
        if not self.rollout.goes_on:
            raise failure
        found = self.faults() or faults_of(failure, self.rollout.tp_size)
        for replica in record.replicas:
            why = found.get(replica) or self.rollout.dead(replica)
            if why is not None:
                record.given_up[replica] = why
        for replica, why in record.given_up.items():
            self.rollout.give_up(replica, f"sync of {record.version} failed: {why}")
        return bool(record.given_up)

    def _put_back(self, failed: SyncRecord, failure: Exception) -> None:
        """Publish what was served before a sync once more, from what is kept of it.

        Errors: `failure`, if that cannot be; the replicas stay fenced.
        """
        before = None if failed.phase != TRAINED else last_published(self.records)
        again: Exception | None = None
        if before is not None:
            record = SyncRecord(
                sync_index=len(self.records) + 1,
                phase=RESTORED,
                version=before.version,
                backend=self.settings.checkpoint_engine,
                replicas=failed.replicas,
                repeats=before.sync_index,
            )
            again = self._attempt(record, PolicyVersion.parse(before.version), None)
            if again is None:
                told = kv(failed=failed.version, served=before.version, why=in_one_line(failure))
                _logger.warning("Weight sync failed, the version before is served again: %s", told)
                return
            _logger.error("%s cannot be put back: %s", before.version, in_one_line(again))
        self._fence(failed, failure)
        _logger.error("which replica the sync failed at cannot be told: the run stops")
        raise failure from again

    def _keep(self, record: SyncRecord, clock: Clock) -> None:
        record.seconds = record.seconds or clock.total()
        record.phases = {**clock.seconds, **record.phases}
        self.records.append(record)

    def _carry_out(
        self, record: SyncRecord, version: PolicyVersion, clock: Clock, proof: Proof | None
    ) -> None:
        live = self.live if self._is_verified(record, proof) else None
        order = Order(version, record.sync_index, live is not None)
        tell_started(
            record,
            self.settings.mode,
            self.rollout.name,
            light=self.settings.verify_light,
            live=self.live is not None,
            due=order.live,
        )
        self.rollout.begin(version, record.replicas)
        success = False
        try:
            moved = self._brought(record, order, clock)
            self._check_light(record, version, moved)
            if live is not None:
                self._check_live(live, record, moved, clock, proof)
            with clock.phase("commit"):
                self._conclude(record, version)
            success = True
            if record.phase != PERTURBED:
                self._expected = moved.expected if order.live else ()
        finally:
            self.close(clock, success=success)
        record.weights_digest = moved.reports[0].weights_digest
        record.seconds = clock.total()
        tell_finished(record)

    def _brought(self, record: SyncRecord, order: Order, clock: Clock) -> Moved:
        if record.phase != RESTORED:
            return self.transfer(order, clock)
        if order.live and not self._expected:
            msg = f"{order.version} was not verified live, so that nothing can be compared with it"
            raise VerificationError(msg)
        moved = self.transfer_kept(order, clock)
        return msgspec.structs.replace(moved, expected=self._expected)

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
        """Whether a live verification follows; after a failure, and for who joins, always."""
        if self.live is None:
            return False
        joins = record.phase == JOINING or any(map(self.rollout.joins, record.replicas))
        again = joins or record.repeats is not None
        return again or proof is not None or self.live.due(record.sync_index)

    def _conclude(self, record: SyncRecord, version: PolicyVersion) -> None:
        """Let requests in; perturbed weights are never served."""
        if record.phase == PERTURBED:
            self.rollout.fence(f"{version} holds perturbed weights", _FENCE_TIMEOUT_S)
        else:
            self.rollout.commit(version, self.settings.timeout_s)

    def _check_light(self, record: SyncRecord, version: PolicyVersion, moved: Moved) -> None:
        reports = moved.reports
        record.payload_bytes = reports[0].nbytes
        record.phases = slowest(reports)
        if self.settings.verify_light:
            record.light = msgspec.structs.asdict(counted(reports))
            check_verified(moved, self.digest_of(version))
            _logger.info("Light transfer verification passed: %s", kv(**record.light))

    def _note_failure(self, record: SyncRecord, error: BaseException) -> None:
        """Of a failure in the middle of a transfer only the rank is known that it comes from."""
        record.error = f"{type(error).__name__}: {error}"
        record.payload_bytes = 0
        if self.settings.verify_light and record.light is None:
            known = error.counts if isinstance(error, MiniRLError) else None
            record.light = msgspec.structs.asdict(known or TensorCounts())
