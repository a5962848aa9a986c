"""The separate sync: a checkpoint engine carries the weights from actor to rollout ranks."""

from minirl.rollout_manager import RolloutManager
from minirl.weight_sync import Clock, SyncSettings, WeightSync
from minirl.worker_calls import wait_all
from minirl.worker_group import WorkerGroup
from rl_core import plugins
from rl_core.errors import MiniRLError
from rl_core.interfaces import CheckpointBackend, CheckpointEngine, LoadReport
from rl_core.metadata import Manifest
from rl_core.versions import PolicyVersion, VersionStore

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
        entry: CheckpointBackend = plugins.load_backend(
            plugins.CHECKPOINT_ENGINES, settings.checkpoint_engine
        )
        self._engine_cls: type[CheckpointEngine] = plugins.load_object(entry.engine)

    def release(self) -> None:
        """Nothing: the engines have devices of their own."""

    def transfer(self, version: PolicyVersion, index: int, clock: Clock) -> list[LoadReport]:
        """Prepare, connect, then send and receive at the same time; finalize in any case."""
        del index
        success = False
        try:
            with clock.phase("prepare"):
                manifest = self._manifest(version)
                self._connect()
            with clock.phase("transfer"):
                reports = self._move(manifest)
            success = True
        finally:
            with clock.phase("finalize"):
                self._finalize(success=success)
        return reports

    def update_weights(self, version: PolicyVersion, phase: str) -> None:
        """Publish the actor's weights; the name that users of verl know for `sync`."""
        self.sync(version, phase)

    def _manifest(self, version: PolicyVersion) -> Manifest:
        manifest: Manifest = self._actors.call_rank(
            0, "manifest", version, self.settings.run_id, timeout_s=self.settings.timeout_s
        )
        return manifest

    def _connect(self) -> None:
        timeout_s = self.settings.timeout_s
        calls = self._actors.submit_each("prepare_transfer", lambda _: ())
        calls += self._receivers.submit_each("prepare_transfer", lambda _: ())
        endpoints = wait_all("prepare_transfer", calls, timeout_s)
        count = self._actors.world_size
        places = self._engine_cls.build_topology(endpoints[:count], endpoints[count:])
        calls = self._actors.submit_each(
            "connect_transfer", lambda rank: (places["sender"][rank], timeout_s)
        )
        calls += self._receivers.submit_each(
            "connect_transfer", lambda rank: (places["receiver"][rank], timeout_s)
        )
        wait_all("connect_transfer", calls, timeout_s + _ANSWER_S)

    def _move(self, manifest: Manifest) -> list[LoadReport]:
        timeout_s = self.settings.timeout_s
        calls = self._receivers.submit_each("receive_weights", lambda _: (manifest, timeout_s))
        calls += self._actors.submit_each("send_weights", lambda _: (manifest, timeout_s))
        answers = wait_all("weight transfer", calls, timeout_s + _ANSWER_S)
        loaded: list[LoadReport | None] = answers[: self._receivers.world_size]
        return [report for report in loaded if report is not None]

    def _finalize(self, *, success: bool) -> None:
        calls = self._actors.submit_each("finalize_transfer", lambda _: (success,))
        calls += self._receivers.submit_each("finalize_transfer", lambda _: (success,))
        try:
            wait_all("finalize_transfer", calls, _FINALIZE_S)
        except (MiniRLError, TimeoutError):
            # After a failure its cause is what matters, and a member may be gone.
            if success:
                raise
