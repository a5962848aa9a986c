"""The Ray actor beside each rollout rank in separate mode."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from minirl.replica_faults import receiver_name
from minirl.rollout_member import RolloutMember
from minirl.transfer_member import TransferMember, never
from minirl.worker_process import ProcessSettings, prepare_process
from rl_core.deadlines import Deadline
from rl_core.errors import LifecycleError, MiniRLError, TransferTimeoutError
from rl_core.interfaces import (
    BucketLease,
    LoadReport,
    RolloutAdapter,
    SupportsCheckpointPath,
    SupportsKeptVersions,
)
from rl_core.metadata import Manifest


class CheckpointWorker(TransferMember, RolloutMember):
    """Receives weights for one rollout rank and hands them to its engine rank."""

    def __init__(self, settings: ProcessSettings) -> None:
        prepare_process(settings)

    def receive_weights(self, manifest: Manifest, seconds: float) -> LoadReport | None:
        """Receive one version and load it into the engine rank; the replica is then LOADED.

        With an engine whose receivers can read a directory themselves, rank 0 of the replica
        makes it load that directory; the other ranks of it then return None.

        What fails in loading has this receiver as its origin, unlike what the transfer raises.
        """
        adapter, deadline = self._ready(), Deadline.after(seconds)
        if isinstance(self.transfer, SupportsCheckpointPath):
            checked = self.transfer.get_checkpoint_path(manifest, deadline)
            if self._tp_rank != 0:
                return None
            with self._loading(_Arrival(iter(()))):
                report = adapter.update_weights_from_disk(checked.path, manifest, deadline)
            return msgspec.structs.replace(
                report, matched=checked.matched, weights_digest=checked.weights_digest
            )
        arrival = _Arrival(self.transfer.receive_weights(manifest, deadline, never()))
        with self._loading(arrival):
            return adapter.update_weights(arrival, manifest, deadline)

    def reload_weights(self, manifest: Manifest, seconds: float) -> LoadReport:
        """As `receive_weights`, of a version that was published before, from what is kept of it.

        Errors: LifecycleError if this checkpoint engine keeps nothing.
        """
        adapter, deadline, engine = self._ready(), Deadline.after(seconds), self.transfer
        if not isinstance(engine, SupportsKeptVersions):
            raise LifecycleError(f"{type(engine).__name__} keeps no version that was published")
        return adapter.update_weights(engine.read_again(manifest, deadline), manifest, deadline)

    @contextmanager
    def _loading(self, arrival: "_Arrival") -> Iterator[None]:
        """A deadline is nobody's fault: the weights may have come too late."""
        try:
            yield
        except TransferTimeoutError:
            raise
        except MiniRLError as error:
            if error is not arrival.error:
                error.blaming(receiver_name(self._rank))
            raise

    def _ready(self) -> RolloutAdapter:
        if self._adapter is None:
            msg = "init_rollout was not called"
            raise RuntimeError(msg)
        return self._adapter


class _Arrival:
    """The leases of a transfer, which remember what went wrong with them first."""

    def __init__(self, leases: Iterator[BucketLease]) -> None:
        self._leases = leases
        self.error: MiniRLError | None = None

    def __iter__(self) -> "_Arrival":
        return self

    def __next__(self) -> BucketLease:
        try:
            return next(self._leases)
        except MiniRLError as error:
            self.error = self.error or error
            raise
