"""The Ray actor beside each rollout rank in separate mode."""

from collections.abc import Mapping
from typing import Any

from minirl.transfer_member import TransferMember, never
from minirl.worker_process import ProcessSettings, prepare_process
from rl_core import plugins
from rl_core.deadlines import Deadline
from rl_core.interfaces import Handle, LoadReport, RolloutAdapter, SupportsCheckpointPath
from rl_core.metadata import Manifest


class CheckpointWorker(TransferMember):
    """Receives weights for one rollout rank and hands them to its engine rank."""

    def __init__(self, settings: ProcessSettings) -> None:
        prepare_process(settings)
        self._adapter: RolloutAdapter | None = None
        self._tp_rank = 0

    def init_rollout(
        self, backend: str, config: Mapping[str, Any], server: Handle, tp_rank: int
    ) -> None:
        """Connect to the engine rank."""
        entry = plugins.load_backend(plugins.ROLLOUT_BACKENDS, backend)
        config_cls = plugins.load_object(entry.config_cls)
        self._tp_rank = tp_rank
        self._adapter = plugins.load_object(entry.adapter)(
            server, tp_rank, plugins.build_config(config_cls, config, "rollout")
        )

    def receive_weights(self, manifest: Manifest, seconds: float) -> LoadReport | None:
        """Receive one version and load it into the engine rank; the replica is then LOADED.

        With an engine whose receivers can read a directory themselves, rank 0 of the replica
        makes it load that directory; the other ranks of it then return None.
        """
        adapter, deadline = self._ready(), Deadline.after(seconds)
        if isinstance(self.transfer, SupportsCheckpointPath):
            path = self.transfer.get_checkpoint_path(manifest, deadline)
            if self._tp_rank != 0:
                return None
            return adapter.update_weights_from_disk(path, manifest, deadline)
        leases = self.transfer.receive_weights(manifest, deadline, never())
        return adapter.update_weights(leases, manifest, deadline)

    def _ready(self) -> RolloutAdapter:
        if self._adapter is None:
            msg = "init_rollout was not called"
            raise RuntimeError(msg)
        return self._adapter
