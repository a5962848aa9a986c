"""Sender: one version on its way to the disk, and from there to the receivers."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rl_ckpt_disk.disk_errors import translated
from rl_ckpt_disk.layout import CheckpointLayout
from rl_ckpt_disk.ready import Marker
from rl_ckpt_disk.shards import ShardWriter
from rl_core.buckets import MEGABYTE
from rl_core.digests import digest_of_digests
from rl_core.errors import ManifestMismatchError, TransferError
from rl_core.interfaces import TransferReport
from rl_core.metadata import ManifestCheck
from rl_core.torch import as_bytes, content_digest, meta_of
from rl_core.transfer.buffers import is_copied
from rl_core.transfer.messages import Begin, Complete, Done, End, Go, Ready
from rl_core.transfer.phases import Phases

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from rl_ckpt_disk.checkpoint_dir import RunDirectory, StagedDirectory
    from rl_ckpt_disk.config import DiskConfig
    from rl_core.interfaces import TensorStream, TransferRole
    from rl_core.metadata import Manifest, TensorMeta, Trailer
    from rl_core.transfer.peers import Peers
    from rl_core.transfer.watch import Watch

DIRECTORY = "directory"
"""Property of `Begin`: name of the checkpoint within the directory of the run."""

_SPARE_BYTES = 1 << 17


@dataclass
class Publication:
    """Agree with the receivers, write, publish, wait until all have read.

    The messages are those of `rl_core.transfer.messages`, without buckets: `End` says that the
    directory named in `Begin` is complete.

    Attributes:
        role: of this sender.
        config: the engine's.
        run: where the run's checkpoints are.
        peers: the receivers.
        watch: ends every wait.
    """

    role: TransferRole
    config: DiskConfig
    run: RunDirectory
    peers: Peers
    watch: Watch

    def __post_init__(self) -> None:
        self._phases = Phases("gather", "digest", "write", "sync", "ack")
        self._digests: dict[str, str] = {}
        self._beside = ThreadPoolExecutor(1, "checkpoint-digest")

    def publish(self, weights: TensorStream, manifest: Manifest, name: str) -> TransferReport:
        """Write the stream as the checkpoint `name`; returns when every receiver has read it.

        Errors: ManifestMismatchError naming a tensor that does not fit the manifest;
        TransferError for what the disk refuses, with the last good version left as it was;
        whatever the stream raises or a receiver reports.
        """
        begin = time.perf_counter()
        layout = CheckpointLayout.of(manifest.tensors, self._max_shard_bytes)
        self._handshake(manifest, name)
        self._check_space(layout)
        staged = self.run.stage(name)
        try:
            trailer = self._write(weights, manifest, staged, layout)
        finally:
            self._beside.shutdown()
            staged.discard()
        try:
            self._hand_over(trailer)
        except BaseException:
            self.run.withdraw(name)
            raise
        seconds = {**self._phases.seconds, "total": time.perf_counter() - begin}
        files = len(layout.shards)
        return TransferReport(trailer.nbytes, files, seconds, trailer.weights_digest)

    def _hand_over(self, trailer: Trailer) -> None:
        with self._phases("ack"):
            self.peers.tell(End(trailer), self.watch)
            self.peers.gather(Done, self.watch)
            self.peers.tell(Complete(), self.watch)

    @property
    def _max_shard_bytes(self) -> int:
        return max(1, int(self.config.max_shard_megabytes * MEGABYTE))

    def _handshake(self, manifest: Manifest, name: str) -> None:
        """Nothing is written before every receiver has agreed to the manifest."""
        bucket = int(self.role.bucket_megabytes * MEGABYTE)
        seconds = self.watch.deadline.remaining()
        kind = self.role.digest_kind
        properties = {DIRECTORY: name}
        hashed = manifest.structure_hash
        self.peers.begin()
        self.peers.tell(Begin(manifest, hashed, bucket, 0, kind, seconds, properties), self.watch)
        self.peers.gather(Ready, self.watch)
        self.peers.tell(Go(), self.watch)

    def _check_space(self, layout: CheckpointLayout) -> None:
        with translated("preparing for a checkpoint", self.run.path):
            free = shutil.disk_usage(self.run.path).free
        needed = layout.nbytes + _SPARE_BYTES
        if free < needed:
            msg = (
                f"a checkpoint needs {needed} bytes, {self.run.path} has {free} left; free some "
                "space, lower keep_last, or set another root_dir"
            )
            raise TransferError(msg)

    def _write(
        self,
        weights: TensorStream,
        manifest: Manifest,
        staged: StagedDirectory,
        layout: CheckpointLayout,
    ) -> Trailer:
        watch = self.watch.hearing(self._hear)
        with ShardWriter(staged, layout, watch) as files:
            trailer = self._stream(weights, manifest, files, watch)
            with self._phases("sync"):
                for path, index in layout.indexes.items():
                    staged.write(path, index)
                if self.config.model_dir is not None:
                    staged.attach(Path(self.config.model_dir))
                files.finish()
        marker = Marker(
            manifest,
            manifest.structure_hash,
            trailer,
            self._max_shard_bytes,
            self._digests,
            staged.sizes(),
        )
        with self._phases("sync"):
            staged.publish(marker.encode(self.role.key))
        return trailer

    def _stream(
        self, weights: TensorStream, manifest: Manifest, files: ShardWriter, watch: Watch
    ) -> Trailer:
        check = ManifestCheck(manifest)
        while True:
            watch.check("the stream of weights")
            with self._phases("gather"):
                drawn = next(weights, None)
            if drawn is None:
                break
            meta, tensor = drawn
            check.see(meta)
            _check_tensor(meta, tensor)
            self._one(meta, tensor, files)
        trailer = check.close()
        digest = digest_of_digests(self._digests) if self.role.digest_kind else None
        return msgspec.structs.replace(trailer, weights_digest=digest)

    def _one(self, meta: TensorMeta, tensor: Tensor, files: ShardWriter) -> None:
        # Beside the writing: both read the tensor, which is valid until the next one is drawn. One
        # that must be copied has its digest before that, which may take a copy itself.
        digest = self._digest(meta, tensor)
        if digest is not None and is_copied(tensor, "cpu"):
            wait([digest])
        try:
            with self._phases("write"):
                files.write(meta, as_bytes(tensor).cpu().numpy().data)
        finally:
            if digest is not None:
                with self._phases("digest"):
                    self._digests[meta.name] = digest.result()

    def _digest(self, meta: TensorMeta, tensor: Tensor) -> Future[str] | None:
        kind = self.role.digest_kind
        return self._beside.submit(content_digest, meta, tensor, kind) if kind else None

    def _hear(self) -> None:
        self.peers.pump(self.watch)


def _check_tensor(meta: TensorMeta, tensor: Tensor) -> None:
    real = meta_of(meta.name, tensor)
    if (real.shape, real.dtype) != (meta.shape, meta.dtype):
        msg = f"tensor {meta.name!r} is {real.shape} {real.dtype}, announced as {meta}"
        raise ManifestMismatchError(msg)
