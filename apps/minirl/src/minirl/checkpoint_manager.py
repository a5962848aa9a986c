"""The separate sync: a checkpoint engine carries the weights from actor to rollout ranks."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minirl.replica_faults import faults_in_closing, faults_in_transfer
from minirl.rollout_manager import RolloutManager
from minirl.sync_record import Clock, Moved, Order
from minirl.sync_settings import SyncSettings
from minirl.weight_sync import WeightSync
from minirl.worker_calls import Witness, wait_all
from minirl.worker_group import WorkerGroup
from rl_core import plugins
from rl_core.deadlines import Deadline
from rl_core.errors import MiniRLError
from rl_core.metadata import Manifest
from rl_core.versions import PolicyVersion, VersionStore

if TYPE_CHECKING:
    from minirl.live_member import Expected
    from rl_core.interfaces import CheckpointBackend, CheckpointEngine, LoadReport, TransferReport

_logger = logging.getLogger(__name__)

_CONNECT_S = 60.0
"""Longest wait for the members to connect, where a run is to go on without one that has died
meanwhile: nobody tells those who wait for it."""
_ANSWER_S = 10.0
_FINALIZE_S = 30.0


class CheckpointEngineManager(WeightSync):
    """Takes both sides of a checkpoint engine through a sync.

    Knows no engine by name: the backend's entry gives the class whose topology is asked for.
    """

    def __init__(
        self,
        actors: WorkerGroup,
        receivers: WorkerGroup,
        rollout: RolloutManager,
        versions: VersionStore,
        settings: SyncSettings,
    ) -> None:
        super().__init__(rollout, versions, settings)
        self._actors = actors
        self._receivers = receivers
        self._introduced: set[int] = set()
        self._taking_part: list[int] = []
        self._witnesses: list[Witness] = []
        self._unclosed: list[Witness] = []
        self._connecting: Deadline | None = None
        entry: CheckpointBackend = plugins.load_backend(
            plugins.CHECKPOINT_ENGINES, settings.checkpoint_engine
        )
        self._engine_cls: type[CheckpointEngine] = plugins.load_object(entry.engine)

    def introduce(self, timeout_s: float) -> None:
        """Let the receivers know their engine ranks, on replicas that came up since last time."""
        tp_size = self.rollout.tp_size
        ranks = [
            rank
            for replica in self.rollout.up()
            for rank in range(replica * tp_size, (replica + 1) * tp_size)
            if rank not in self._introduced
        ]
        arguments = self.rollout.adapter_arguments
        calls = self._receivers.submit_each("init_rollout", arguments, ranks)
        wait_all("init_rollout", calls, timeout_s, self._witnesses)
        self._introduced.update(ranks)

    def release(self) -> None:
        """Nothing: the engines have devices of their own."""

    def transfer(self, order: Order, clock: Clock) -> Moved:
        """Prepare, connect, then send and receive at the same time.

        Of the receivers only those take part whose replicas do: `RolloutManager.receiving`.
        """
        ranks = self._taking_part = self.rollout.receiving
        self._witnesses.clear()
        self._unclosed.clear()
        with clock.phase("prepare"):
            self.introduce(self.settings.timeout_s)
            manifest = self._manifest(order.version)
            self._connect(ranks)
        with clock.phase("transfer"):
            return self._move(manifest, ranks, live=order.live)

    def transfer_kept(self, order: Order, clock: Clock) -> Moved:
        """Every receiver reads the version again, if its checkpoint engine keeps it."""
        ranks = self.rollout.receiving
        self._taking_part = []  # in no transfer: there is nothing to finalize
        self._witnesses.clear()
        self._unclosed.clear()
        timeout_s = self.settings.timeout_s
        with clock.phase("transfer"):
            manifest = self._manifest(order.version)
            calls = self._receivers.submit_each(
                "reload_weights", lambda _: (manifest, timeout_s), ranks
            )
            reports = wait_all(
                "putting a version back", calls, timeout_s + _ANSWER_S, self._witnesses
            )
        return Moved(reports, ranks=ranks)

    def close(self, clock: Clock, *, success: bool) -> None:
        """Finalize the engines of all who took part.

        Only then a version counts as received, so that one which was not committed may be sent
        again.
        """
        if self._taking_part:
            with clock.phase("finalize"):
                self._finalize(self._taking_part, success=success)

    def faults(self) -> dict[int, str]:
        """Replicas whose members failed in the transfer, or did not even close it."""
        size, asked = self.rollout.tp_size, len(self._taking_part)
        found = faults_in_transfer(self._witnesses, size)
        return faults_in_closing(self._unclosed, asked, size) | found

    def update_weights(self, version: PolicyVersion, phase: str) -> None:
        """Publish the actor's weights; the name that users of verl know for `sync`."""
        self.sync(version, phase)

    def _manifest(self, version: PolicyVersion) -> Manifest:
        manifest: Manifest = self._actors.call_rank(
            0, "manifest", version, self.settings.run_id, timeout_s=self.settings.timeout_s
        )
        return manifest

    def _connect(self, ranks: Sequence[int]) -> None:
        timeout_s = self.settings.timeout_s
        calls = self._actors.submit_each("prepare_transfer", lambda _: ())
        calls += self._receivers.submit_each("prepare_transfer", lambda _: (), ranks)
        endpoints = wait_all("prepare_transfer", calls, timeout_s, self._witnesses)
        count = self._actors.world_size
        places = self._engine_cls.build_topology(endpoints[:count], endpoints[count:])
        receivers = dict(zip(ranks, places["receiver"], strict=True))
        if self.rollout.goes_on:
            timeout_s = min(timeout_s, _CONNECT_S)
        self._connecting = Deadline.after(timeout_s)
        calls = self._actors.submit_each(
            "connect_transfer", lambda rank: (places["sender"][rank], timeout_s)
        )
        calls += self._receivers.submit_each(
            "connect_transfer", lambda rank: (receivers[rank], timeout_s), ranks
        )
        wait_all("connect_transfer", calls, timeout_s + _ANSWER_S, self._witnesses)
        self._connecting = None

    def _move(self, manifest: Manifest, ranks: Sequence[int], *, live: bool) -> Moved:
        timeout_s = self.settings.timeout_s
        calls = self._receivers.submit_each(
            "receive_weights", lambda _: (manifest, timeout_s), ranks
        )
        calls += self._actors.submit_each("send_weights", lambda _: (manifest, timeout_s, live))
        answers = wait_all("weight transfer", calls, timeout_s + _ANSWER_S, self._witnesses)
        loaded: list[LoadReport | None] = answers[: len(ranks)]
        sent: list[tuple[TransferReport, Expected]] = answers[len(ranks) :]
        reports = {rank: one for rank, one in zip(ranks, loaded, strict=True) if one is not None}
        expected = [one for _, one in sent]
        return Moved(list(reports.values()), expected, list(reports), sent[0][0].weights_digest)

    def _finalize(self, ranks: Sequence[int], *, success: bool) -> None:
        calls = self._actors.submit_each("finalize_transfer", lambda _: (success,))
        calls += self._receivers.submit_each("finalize_transfer", lambda _: (success,), ranks)
        # Whoever still waits for another one to connect cannot close before; it is not to blame.
        waiting_s = 0.0 if self._connecting is None else self._connecting.remaining()
        self._connecting = None
        try:
            wait_all("finalize_transfer", calls, waiting_s + _FINALIZE_S, self._unclosed)
        except (MiniRLError, TimeoutError) as error:
            # After a failure its cause is what matters, and a member may be gone.
            if success and not self.rollout.goes_on:
                raise
            if success:
                # What was committed is served; the next sync finds out who cannot take part.
                _logger.warning("a sync that was committed could not be closed: %s", error)
