"""Receiver: one version on its way in from the disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rl_ckpt_disk.checkpoint import Checkpoint
from rl_ckpt_disk.publication import DIRECTORY
from rl_core import digests
from rl_core.buckets import align
from rl_core.errors import MessageError
from rl_core.interfaces import LeasedTensor
from rl_core.torch import content_digest, from_bytes
from rl_core.transfer.lending import Lending
from rl_core.transfer.messages import Begin, Complete, Done, End, Go, Ready
from rl_core.transfer.reception import check_announcement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_ckpt_disk.checkpoint_dir import RunDirectory
    from rl_core.interfaces import BucketLease, TransferRole
    from rl_core.metadata import Manifest, TensorMeta
    from rl_core.transfer.link import Link
    from rl_core.transfer.watch import Watch


class ReadBuffer:
    """Host memory that tensors are read into; kept from sync to sync."""

    def __init__(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def of(self, nbytes: int) -> torch.Tensor:
        """Flat uint8 memory of at least `nbytes`."""
        if self._tensor.numel() < nbytes:
            self._tensor = torch.empty(0, dtype=torch.uint8)  # never both at once
            self._tensor = torch.empty(nbytes, dtype=torch.uint8)
        return self._tensor

    def drop(self) -> None:
        """Give the memory back."""
        self._tensor = torch.empty(0, dtype=torch.uint8)


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
    buffer: ReadBuffer = field(default_factory=ReadBuffer)
    held: Held = field(default_factory=Held)


class Reading(Lending):
    """Waits until the sender has published, checks the directory, reads it in stream order."""

    def __init__(self, setting: Setting, manifest: Manifest, link: Link, watch: Watch) -> None:
        """`watch` without news; those of the sender are added."""
        super().__init__()
        self._setting = setting
        self._manifest = manifest
        self._link = link
        self._watch = watch.hearing(self.hear)

    def run(self) -> Iterator[BucketLease]:
        """Agree, wait, read, and wait for the others."""
        checkpoint = self._await()
        try:
            for bucket in self._buckets():
                yield self.lend(self._read(checkpoint, bucket))
                self.check_returned()
                self._watch.check("the consumer to go on")
            self._agree(checkpoint)
        finally:
            checkpoint.close()
            if self._setting.held.checkpoint is not checkpoint:
                checkpoint.release()

    def path(self) -> Checkpoint:
        """Agree, wait, check every file, and wait for the others; the checkpoint stays held.

        The digests are recomputed here, where there are any: the engine that loads the directory
        does not know them.
        """
        checkpoint = self._await()
        try:
            for bucket in self._buckets():
                for entry in self._read(checkpoint, bucket):
                    _check_digest(entry)
            self._agree(checkpoint)
        finally:
            checkpoint.close()
            if self._setting.held.checkpoint is not checkpoint:
                checkpoint.release()
        return checkpoint

    def hear(self) -> None:
        """Raise what the sender has reported, or that it is gone."""
        self._link.pump(self._watch.deadline)

    def _await(self) -> Checkpoint:
        begin = self._link.expect(Begin, self._watch)
        check_announcement(begin, self._manifest, self._setting.role.digest_kind)
        name = begin.properties.get(DIRECTORY, "")
        if not name or "/" in name or name.startswith("."):
            raise MessageError(f"the sender names no directory: {begin.properties}")
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

    def _agree(self, checkpoint: Checkpoint) -> None:
        self._link.tell(Done(), self._watch)
        self._link.expect(Complete, self._watch)
        self._setting.held.replace(checkpoint)

    def _buckets(self) -> Iterator[list[TensorMeta]]:
        """Tensors that fit into a bucket together; a larger one goes alone."""
        capacity = int(self._setting.role.bucket_megabytes * (1 << 20))
        bucket: list[TensorMeta] = []
        used = 0
        for meta in self._manifest.tensors:
            if bucket and used + align(meta.nbytes) > capacity:
                yield bucket
                bucket, used = [], 0
            bucket.append(meta)
            used += align(meta.nbytes)
        if bucket:
            yield bucket

    def _read(self, checkpoint: Checkpoint, metas: Sequence[TensorMeta]) -> list[LeasedTensor]:
        buffer = self._setting.buffer.of(sum(align(meta.nbytes) for meta in metas))
        for meta in metas:
            checkpoint.read_ahead(meta)
        entries, offset = [], 0
        for meta in metas:
            data = buffer[offset : offset + meta.nbytes]
            checkpoint.read(meta, data, self._watch)
            digest = checkpoint.marker.digests.get(meta.name)
            entries.append(LeasedTensor(meta, from_bytes(data, meta), digest))
            offset += align(meta.nbytes)
        return entries


def _check_digest(entry: LeasedTensor) -> None:
    if entry.digest is not None:
        kind = digests.kind_of(entry.digest)
        found = content_digest(entry.meta, entry.tensor, kind)
        digests.check(entry.meta.name, entry.digest, found)
