"""Receiver: a version that was published before, read once more, without a sender."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ckpt_disk.checkpoint import Checkpoint
from rl_ckpt_disk.read_ahead import ReadAhead, ReadBuffers, buckets
from rl_core.buckets import MEGABYTE
from rl_core.errors import TransferError
from rl_core.transfer.lending import Lending

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_ckpt_disk.checkpoint_dir import RunDirectory
    from rl_core.interfaces import BucketLease, TransferRole
    from rl_core.metadata import Manifest
    from rl_core.transfer.watch import Watch


class KeptVersion(Lending):
    """Reads the newest complete directory of a version, with the digests that its marker has."""

    def __init__(
        self, role: TransferRole, run: RunDirectory, manifest: Manifest, watch: Watch
    ) -> None:
        super().__init__()
        self._role = role
        self._run = run
        self._manifest = manifest
        self._watch = watch

    def run(self) -> Iterator[BucketLease]:
        """Errors: TransferError if no directory is kept, and those of reading one."""
        checkpoint = self._open()
        reader = ReadAhead(checkpoint, ReadBuffers(), self._watch)
        capacity = int(self._role.bucket_megabytes * MEGABYTE)
        try:
            for entries in reader.read(buckets(self._manifest.tensors, capacity), self._watch):
                yield self.lend(entries)
                self.check_returned()
        finally:
            reader.close(wait_for_it=False)
            checkpoint.let_go()

    def hear(self) -> None:
        """There is no sender."""

    def _open(self) -> Checkpoint:
        version = self._manifest.version
        found = self._run.complete_of(version)
        if not found:
            raise TransferError(f"no directory of version {version} is kept in {self._run.path}")
        checkpoint = Checkpoint.await_ready(found[-1], self._role.key, self._watch)
        try:
            checkpoint.check(self._manifest)
        except BaseException:
            checkpoint.release()
            raise
        return checkpoint
