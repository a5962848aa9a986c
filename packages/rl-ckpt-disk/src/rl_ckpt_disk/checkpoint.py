"""Receiver: a published checkpoint, found, checked and read."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from rl_ckpt_disk.disk_errors import translated
from rl_ckpt_disk.layout import CheckpointLayout
from rl_ckpt_disk.leases import DirectoryLease
from rl_ckpt_disk.ready import READY_FILE, Marker
from rl_core.errors import ManifestMismatchError, TransferError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rl_core.metadata import Manifest, TensorMeta, Trailer
    from rl_core.transfer.watch import Watch

READ_BYTES = 64 << 20
"""Read in one call; in between, cancellation and failed peers are noticed."""

_LOOK_S = 0.05


class Checkpoint:
    """A complete directory that nobody removes while this object holds it.

    Its files are opened at once, so that the weights can be read to the end whatever happens to
    their names. They are read, never mapped: a mapping would follow the file, not keep its bytes.

    Attributes:
        path: the directory.
        marker: what it says about itself.
    """

    def __init__(self, path: Path, marker: Marker, lease: DirectoryLease) -> None:
        self.path = path
        self.marker = marker
        self._lease = lease
        self._files: dict[str, int] = {}
        tensors, largest = marker.manifest.tensors, marker.max_shard_bytes
        self._layout = CheckpointLayout.of(tensors, largest)

    @classmethod
    def await_ready(cls, path: Path, key: bytes, watch: Watch) -> Checkpoint:
        """Wait for the READY marker of a directory, and hold it.

        Args:
            path: where the directory is, or will be.
            key: of the run; a marker made with another one is refused.
            watch: ends the wait.

        Errors: TransferTimeoutError, MessageError (forged marker), TransferError.
        """
        while not (path / READY_FILE).is_file():
            watch.check(f"{path / READY_FILE}")
            time.sleep(_LOOK_S)
        with translated("opening a checkpoint", path):
            lease = DirectoryLease(path)
        try:
            with translated("opening a checkpoint", path):
                content = (path / READY_FILE).read_bytes()
            return cls(path, Marker.decode(content, key), lease)
        except BaseException:
            lease.release()
            raise

    def check(self, manifest: Manifest, trailer: Trailer | None = None) -> None:
        """Compare marker, file sizes and headers with what is expected; opens the files.

        Errors: ManifestMismatchError naming what differs, TransferError.
        """
        self.marker.check(manifest, trailer)
        for name, size in self.marker.files.items():
            self._check_size(name, size)
        for shard in self._layout.shards:
            with translated("opening a checkpoint", self.path / shard.file):
                fd = os.open(self.path / shard.file, os.O_RDONLY | os.O_CLOEXEC)
                self._files[shard.file] = fd
                head = os.pread(fd, len(shard.head), 0)
            if head != shard.head or self.marker.files.get(shard.file) != shard.nbytes:
                msg = f"{self.path / shard.file} is not laid out as the manifest says"
                raise ManifestMismatchError(msg)

    def read(self, meta: TensorMeta, into: Tensor, watch: Watch) -> None:
        """Read the bytes of one tensor; `check` came before.

        Args:
            meta: which tensor.
            into: flat uint8 on the host, `meta.nbytes` long.
            watch: ends the reading.

        Errors: TransferError naming tensor and file if the file is too short or unreadable.
        """
        extent = self._layout.extents[meta.name]
        target, done = memoryview(into.numpy()), 0
        while done < meta.nbytes:
            watch.check(f"tensor {meta.name!r} to be read")
            with translated(f"reading tensor {meta.name!r}", self.path / extent.file):
                chunk = target[done : done + READ_BYTES]
                count = os.preadv(self._files[extent.file], [chunk], extent.offset + done)
            if count == 0:
                msg = f"{self.path / extent.file} ends inside tensor {meta.name!r}"
                raise TransferError(msg)
            done += count

    def close(self) -> None:
        """Close the files; the directory stays held. Idempotent."""
        files, self._files = self._files, {}
        for fd in files.values():
            os.close(fd)

    def let_go(self) -> None:
        """Let the directory be removed from now on; open files can still be read. Idempotent."""
        self._lease.release()

    def release(self) -> None:
        """Close the files and let the directory go. Idempotent."""
        self.close()
        self.let_go()

    def _check_size(self, name: str, size: int) -> None:
        try:
            found = (self.path / name).stat().st_size
        except FileNotFoundError as error:
            msg = f"{self.path / name} is missing from a checkpoint that was complete"
            raise ManifestMismatchError(msg + self._lacking(name, 0)) from error
        except OSError as error:
            raise TransferError(f"cannot read {self.path / name}: {error}") from error
        if found != size:
            msg = f"{self.path / name} has {found} bytes, not {size}"
            raise ManifestMismatchError(msg + self._lacking(name, found))

    def _lacking(self, name: str, nbytes: int) -> str:
        """Which tensors are not whole in the first `nbytes` of a file, for messages."""
        shards = [shard for shard in self._layout.shards if shard.file == name]
        ends = {meta: end for shard in shards for meta, end in shard.ends.items() if end > nbytes}
        if not ends:
            return ""
        first = min(ends, key=lambda meta: ends[meta])
        return f"; it lacks {len(ends)} tensors, the first in the file is {first!r}"
