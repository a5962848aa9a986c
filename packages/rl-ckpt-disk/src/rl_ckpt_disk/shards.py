"""Sender: weights files of a staged checkpoint, filled as tensors come."""

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from rl_ckpt_disk.checkpoint_dir import StagedDirectory, write_all
from rl_ckpt_disk.disk_errors import translated
from rl_ckpt_disk.layout import CheckpointLayout, Shard
from rl_core.metadata import TensorMeta
from rl_core.transfer.watch import POLL_S, Watch

CHUNK_BYTES = 32 << 20
"""Written in one call; in between, cancellation and failed peers are noticed."""

SYNC_BYTES = 64 << 20
"""After so many bytes the kernel is asked to write them out, beside the stream."""


class _OpenShard:
    """One file while tensors are written into it."""

    def __init__(self, shard: Shard, fd: int) -> None:
        self.shard = shard
        self.fd = fd
        self.missing = len(shard.extents)
        self.unsynced = 0


class ShardWriter:
    """Writes tensors to their places, in whatever order they come.

    A second thread syncs what was written while the stream goes on, so that little is left to
    wait for at the end.
    """

    def __init__(self, staged: StagedDirectory, layout: CheckpointLayout, watch: Watch) -> None:
        self._staged = staged
        self._layout = layout
        self._watch = watch
        self._files: dict[str, _OpenShard] = {}
        self._syncs = ThreadPoolExecutor(1, "checkpoint-sync")
        self._pending: list[Future[None]] = []

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After a failure a disk that hangs must not hang the sender too; the thread ends alone.
        self._syncs.shutdown(wait=error is None, cancel_futures=True)
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()

    def write(self, meta: TensorMeta, data: memoryview) -> None:
        """Write the bytes of one tensor to its place.

        Args:
            meta: what it is called.
            data: its bytes, row-major, contiguous.
        """
        extent = self._layout.extents[meta.name]
        file = self._file(extent.file)
        with translated("writing a checkpoint", self._staged.path / extent.file):
            for start in range(0, data.nbytes, CHUNK_BYTES):
                self._watch.check("the checkpoint to be written")
                chunk = data[start : start + CHUNK_BYTES]
                write_all(file.fd, chunk, extent.offset + start)
                file.unsynced += chunk.nbytes
        file.missing -= 1
        if file.missing == 0 or file.unsynced >= SYNC_BYTES:
            self._sync(file)

    def finish(self) -> None:
        """Wait until every byte is on the disk. Every tensor must have been written."""
        for shard in self._layout.shards:
            if not shard.extents:
                self._sync(self._file(shard.file))
        for sync in self._pending:
            while not wait([sync], POLL_S).done:
                self._watch.check("the checkpoint to reach the disk")
            sync.result()

    def _file(self, name: str) -> _OpenShard:
        if name not in self._files:
            shard = next(shard for shard in self._layout.shards if shard.file == name)
            self._files[name] = _OpenShard(shard, self._staged.create(name))
            with translated("writing a checkpoint", self._staged.path / name):
                write_all(self._files[name].fd, memoryview(shard.head), 0)
        return self._files[name]

    def _sync(self, file: _OpenShard) -> None:
        file.unsynced = 0
        path = self._staged.path / file.shard.file
        # A descriptor of its own: the writer's may be closed while the thread still syncs.
        fd = os.dup(file.fd)
        self._pending.append(self._syncs.submit(_sync_file, fd, path))


def _sync_file(fd: int, path: object) -> None:
    try:
        with translated("writing a checkpoint", path):  # type: ignore[arg-type]
            os.fsync(fd)
    finally:
        os.close(fd)
