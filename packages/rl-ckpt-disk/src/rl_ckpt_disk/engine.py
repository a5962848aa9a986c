"""The disk checkpoint engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

from rl_ckpt_disk.checkpoint_dir import RunDirectory
from rl_ckpt_disk.kept import KeptVersion
from rl_ckpt_disk.publication import Publication
from rl_ckpt_disk.reading import Reading, Setting
from rl_core.errors import LifecycleError
from rl_core.transfer.group_engine import GroupEngine, check_role
from rl_core.transfer.groups import RECEIVER, SENDER
from rl_core.transfer.mover import Mover
from rl_core.transfer.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_ckpt_disk.config import DiskConfig
    from rl_core.deadlines import Deadline
    from rl_core.interfaces import (
        BucketLease,
        CheckedDirectory,
        Endpoint,
        TensorStream,
        TransferReport,
        TransferRole,
    )
    from rl_core.metadata import Manifest
    from rl_core.transfer.link import Link
    from rl_core.transfer.peers import Peers


class DiskCheckpointEngine(GroupEngine):
    """Sender 0 writes a Hugging Face directory, every receiver reads it.

    Bytes go over the file system; agreement, acknowledgements and errors go over the control
    channel, so that a receiver hears of a failure at once and never polls a directory that may not
    come.

    Where no digests were agreed on, the instance is a `DirectoryCheckpointEngine`, whose receivers
    may also ask for the directory. Where they were, a receiver hands out tensors with their
    digests and nothing else: a file that was checked may change before somebody else reads it,
    the bytes of a lease do not.
    """

    def __new__(cls, config: DiskConfig, role: TransferRole) -> Self:
        """An engine that can do what its role allows. Touches no disk."""
        del config
        unverified = cls is DiskCheckpointEngine and role.digest_kind is None
        return super().__new__(cast("type[Self]", DirectoryCheckpointEngine) if unverified else cls)

    def __init__(self, config: DiskConfig, role: TransferRole) -> None:
        """Touches no disk. Errors: ConfigError."""
        check_role(role)
        self._files = _DiskMover(config, role)
        super().__init__(role, self._files)

    def prepare(self) -> Endpoint:
        """Open the control channel; the sender also makes sure that it can write.

        Errors: TransferError naming the directory and the reason.
        """
        if self._role.role == SENDER and self._role.rank == 0:
            self._files.run.create()
        return super().prepare()

    def read_again(self, manifest: Manifest, deadline: Deadline) -> Iterator[BucketLease]:
        """Leases of a version that was published before, from the directory kept of it. Receivers.

        As `receive_weights`, but nobody sends: it belongs to no sync, and leaves the engine as it
        is.

        Errors: TransferError if no directory is kept; what reading one raises.
        """
        if self._role.role != RECEIVER:
            raise LifecycleError(f"read_again is for receivers, not for a {self._role.role}")
        kept = KeptVersion(self._role, self._files.run, manifest, Watch(deadline))
        return kept.leases(on_error=lambda _: None)


class DirectoryCheckpointEngine(DiskCheckpointEngine):
    """A disk engine without digests; its receivers may load the directory themselves."""

    def get_checkpoint_path(self, manifest: Manifest, deadline: Deadline) -> CheckedDirectory:
        """Instead of `receive_weights`: the complete directory of this version. Receivers.

        The directory stays until this engine has completed a later version, or is shut down. Its
        marker, file sizes and headers were compared with the manifest, its contents with nothing:
        `matched` is 0.

        Errors: those of `receive_weights`.
        """
        lending = self.start_receiving("get_checkpoint_path", manifest, Watch(deadline))
        reading = cast("Reading", lending)  # what `_DiskMover.receive` makes
        try:
            directory = reading.directory()
        except BaseException as error:
            self.fail(error)
            raise
        self.received()
        return directory


class _DiskMover(Mover):
    """Writes and reads checkpoints."""

    def __init__(self, config: DiskConfig, role: TransferRole) -> None:
        self._config = config
        self._role = role
        self.run = RunDirectory(Path(config.root_dir), role.run_id)
        self._setting = Setting(role, self.run)
        self._published = ""

    def send(
        self, weights: TensorStream, manifest: Manifest, peers: Peers, watch: Watch
    ) -> TransferReport:
        name = self.run.free_name(manifest.version)
        publication = Publication(self._role, self._config, self.run, peers, watch)
        report = publication.publish(weights, manifest, name)
        self._published = name
        return report

    def receive(self, manifest: Manifest, link: Link, watch: Watch) -> Reading:
        return Reading(self._setting, manifest, link, watch)

    def conclude(self, *, success: bool) -> None:
        """Older versions go once this one counts; one that does not takes nobody's place."""
        name, self._published = self._published, ""
        if name and not success:
            self.run.withdraw(name)
        if name:
            self.run.prune(self._config.keep_last)

    def close(self) -> None:
        self._setting.held.replace(None)
        self._setting.buffers.drop()
