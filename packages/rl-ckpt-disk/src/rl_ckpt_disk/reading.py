"""Receiver: one version on its way in from the disk."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rl_ckpt_disk.checkpoint import Checkpoint
from rl_ckpt_disk.publication import DIRECTORY
from rl_ckpt_disk.read_ahead import ReadAhead, ReadBuffers, buckets
from rl_core.buckets import MEGABYTE
from rl_core.errors import MessageError
from rl_core.interfaces import CheckedDirectory
from rl_core.transfer.lending import Lending
from rl_core.transfer.messages import Begin, Complete, Done, End, Go, Ready
from rl_core.transfer.reception import check_announcement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_ckpt_disk.checkpoint_dir import RunDirectory
    from rl_core.interfaces import BucketLease, LeasedTensor, TransferRole
    from rl_core.metadata import Manifest
    from rl_core.transfer.link import Link
    from rl_core.transfer.watch import Watch


@dataclass
class Held:
    """The checkpoint that a receiver keeps from being removed: the last one it completed."""

    checkpoint: Checkpoint | None = None

    def replace(self, checkpoint: Checkpoint | None) -> None:
        """Let the old one go, hold another one."""
        old, self.checkpoint = self.checkpoint, checkpoint
        if old is not None:
            old.release()


@dataclass
class Setting:
    """What all readings of one engine share."""

    role: TransferRole
    run: RunDirectory
    buffers: ReadBuffers = field(default_factory=ReadBuffers)
    held: Held = field(default_factory=Held)


class Reading(Lending):
    """Waits until the sender has published, checks the directory, reads it in stream order."""

    def __init__(self, setting: Setting, manifest: Manifest, link: Link, watch: Watch) -> None:
        """`watch` without news; those of the sender are added."""
        super().__init__()
        self._setting = setting
        self._manifest = manifest
        self._link = link
        self._quiet = watch
        self._watch = watch.hearing(self.hear)

    def run(self) -> Iterator[BucketLease]:
        """Agree, wait, read, and wait for the others."""
        for entries in self._entries():
            yield self.lend(entries)
            self.check_returned()
            self._watch.check("the consumer to go on")

    def directory(self) -> CheckedDirectory:
        """Agree, wait for the directory and for the others; it stays held, and is not read."""
        checkpoint = self._await()
        with self._completed(checkpoint):
            checkpoint.close()
        return CheckedDirectory(checkpoint.path)

    def hear(self) -> None:
        """Raise what the sender has reported, or that it is gone."""
        self._link.pump(self._watch.deadline)

    def _await(self) -> Checkpoint:
        begin = self._link.expect(Begin, self._watch)
        check_announcement(begin, self._manifest, self._setting.role.digest_kind)
        name = begin.properties.get(DIRECTORY, "")
        if not name or "/" in name or name.startswith("."):
            raise MessageError(f"the sender names no directory: {begin.properties}")
        self._quiet = self._quiet.sooner(begin.seconds)
        self._watch = self._watch.sooner(begin.seconds)
        self._link.tell(Ready(), self._watch)
        self._link.expect(Go, self._watch)
        trailer = self._link.expect(End, self._watch).trailer
        path = self._setting.run.path / name
        checkpoint = Checkpoint.await_ready(path, self._setting.role.key, self._watch)
        try:
            checkpoint.check(self._manifest, trailer)
        except BaseException:
            checkpoint.release()
            raise
        return checkpoint

    def _entries(self) -> Iterator[list[LeasedTensor]]:
        """Everything, one bucket at a time; complete on all receivers when it ends."""
        checkpoint = self._await()
        reader = ReadAhead(checkpoint, self._setting.buffers, self._quiet)
        capacity = int(self._setting.role.bucket_megabytes * MEGABYTE)
        read_to_the_end = False
        try:
            with self._completed(checkpoint):
                yield from reader.read(buckets(self._manifest.tensors, capacity), self._watch)
                read_to_the_end = True
        finally:
            reader.close(wait_for_it=read_to_the_end)
            if not read_to_the_end:
                # Its thread may be in the middle of a read: what arrives late goes nowhere else.
                self._setting.buffers = ReadBuffers()

    @contextmanager
    def _completed(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Be done with the block together with the other receivers; hold the checkpoint then."""
        complete = False
        try:
            yield
            self._link.tell(Done(), self._watch)
            self._link.expect(Complete, self._watch)
            complete = True
        finally:
            if complete:
                self._setting.held.replace(checkpoint)
            else:
                checkpoint.let_go()
