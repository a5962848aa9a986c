"""The Ray actor beside each rollout rank in separate mode."""

import msgspec

from minirl.rollout_member import RolloutMember
from minirl.transfer_member import TransferMember, never
from minirl.worker_process import ProcessSettings, prepare_process
from rl_core.deadlines import Deadline
from rl_core.interfaces import LoadReport, RolloutAdapter, SupportsCheckpointPath
from rl_core.metadata import Manifest


class CheckpointWorker(TransferMember, RolloutMember):
    """Receives weights for one rollout rank and hands them to its engine rank."""

    def __init__(self, settings: ProcessSettings) -> None:
        prepare_process(settings)

    def receive_weights(self, manifest: Manifest, seconds: float) -> LoadReport | None:
        """Receive one version and load it into the engine rank; the replica is then LOADED.

        With an engine whose receivers can read a directory themselves, rank 0 of the replica
        makes it load that directory; the other ranks of it then return None.
        """
        adapter, deadline = self._ready(), Deadline.after(seconds)
        if isinstance(self.transfer, SupportsCheckpointPath):
            checked = self.transfer.get_checkpoint_path(manifest, deadline)
            if self._tp_rank != 0:
                return None
            report = adapter.update_weights_from_disk(checked.path, manifest, deadline)
            return msgspec.structs.replace(
                report, matched=checked.matched, weights_digest=checked.weights_digest
            )
        leases = self.transfer.receive_weights(manifest, deadline, never())
        return adapter.update_weights(leases, manifest, deadline)

    def _ready(self) -> RolloutAdapter:
        if self._adapter is None:
            msg = "init_rollout was not called"
            raise RuntimeError(msg)
        return self._adapter
