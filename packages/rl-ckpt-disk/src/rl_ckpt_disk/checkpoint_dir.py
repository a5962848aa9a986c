"""Directories of checkpoints: staged, completed, published, pruned.

```
root_dir/<run>/                       one for each run, mode 0700
  .staging-<name>-<token>/            being written; removed if its writer died
  e1.s3/                              complete: renamed from staging in one step
    READY                             marker, written last
    .lease                            readers hold a shared lock on it
    model-00001-of-00002.safetensors  ...
    model.safetensors.index.json  config.json  tokenizer.json  ...
```
"""

import hashlib
import logging
import os
import re
import secrets
import shutil
from pathlib import Path

from rl_ckpt_disk.disk_errors import translated
from rl_ckpt_disk.leases import own, unless_in_use
from rl_ckpt_disk.ready import READY_FILE
from rl_core.durable import sync_path
from rl_core.versions import PolicyVersion

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(e\d+\.s\d+)(?:\.(\d+))?")
_STAGING = ".staging-"
_TRASH = ".trash-"
_MODE = 0o700
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|onnx|msgpack|index\.json)")
_ATTACHMENT_BYTES = 64 << 20


class RunDirectory:
    """All checkpoints of one run. One sender writes, any number of receivers read."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.path = root / _file_name(run_id)

    def create(self) -> None:
        """Make it, and see that it can be written; TransferError if not."""
        with translated("preparing for checkpoints", self.path):
            self.path.mkdir(parents=True, exist_ok=True, mode=_MODE)
            probe = self.path / f"{_STAGING}probe-{secrets.token_hex(4)}"
            probe.mkdir(mode=_MODE)
            probe.rmdir()

    def free_name(self, version: PolicyVersion) -> str:
        """Name of a fresh directory for a version: `e1.s3`, or `e1.s3.2` if that exists."""
        name, number = str(version), 1
        while (self.path / name).exists():
            number += 1
            name = f"{version}.{number}"
        return name

    def stage(self, name: str) -> "StagedDirectory":
        """A new directory to be published as `name`."""
        path = self.path / f"{_STAGING}{name}-{secrets.token_hex(4)}"
        with translated("staging a checkpoint", path):
            path.mkdir(mode=_MODE)
            return StagedDirectory(path, self.path / name)

    def complete(self) -> list[Path]:
        """Published directories, oldest version first."""
        with translated("listing checkpoints", self.path):
            found = [path for path in self.path.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(
            (path for path in found if (path / READY_FILE).is_file()),
            key=lambda path: _sort_key(path.name),
        )

    def complete_of(self, version: PolicyVersion) -> list[Path]:
        """Published directories of one version, the newest last."""
        return [path for path in self.complete() if _sort_key(path.name)[0] == version]

    def prune(self, keep_last: int) -> None:
        """Remove what nobody needs: all but the newest versions, and leftovers.

        Of a version that was published again, for a late receiver, the last directory counts.
        Directories that are being read, or written by another process, stay until a later call.
        What cannot be removed is logged; it does no harm to the versions that stay.
        """
        try:
            newest = {_sort_key(path.name)[0]: path for path in self.complete()}
            kept = list(newest.values())[-keep_last:]
            old = [path for path in self.complete() if path not in kept]
            leftovers = [path for path in self.path.iterdir() if _is_leftover(path)]
            trash = [path for path in self.path.iterdir() if path.name.startswith(_TRASH)]
            for path in (*old, *leftovers):
                self._remove(path)
            for path in trash:
                shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            logger.warning("could not remove old checkpoints from %s: %s", self.path, error)

    def withdraw(self, name: str) -> None:
        """Take a published directory back whose version did not reach every receiver.

        It counts for nothing any more; while somebody still reads it, its files stay. Never raises.
        """
        path = self.path / name
        try:
            (path / READY_FILE).unlink(missing_ok=True)
            self._remove(path)
        except OSError as error:
            logger.warning("could not remove the failed checkpoint %s: %s", path, error)

    def _remove(self, path: Path) -> None:
        with unless_in_use(path) as free:
            if not free:
                return
            # Out of the way in one step, so that no reader finds a directory that is half there.
            trash = self.path / f"{_TRASH}{secrets.token_hex(8)}"
            path.rename(trash)
        shutil.rmtree(trash)


class StagedDirectory:
    """A checkpoint that is being written; its writer holds the lock on it."""

    def __init__(self, path: Path, final: Path) -> None:
        self.path = path
        self.final = final
        self._lock = own(path)

    def create(self, name: str) -> int:
        """A new file for writing; its descriptor, which the caller syncs and closes."""
        target = self.path / name
        with translated("writing a checkpoint", target):
            target.parent.mkdir(exist_ok=True, mode=_MODE)
            return os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, name: str, content: bytes) -> None:
        """Write a whole small file, down to the disk."""
        fd = self.create(name)
        try:
            with translated("writing a checkpoint", self.path / name):
                write_all(fd, memoryview(content), 0)
                os.fsync(fd)
        finally:
            os.close(fd)

    def attach(self, model_dir: Path) -> None:
        """Copy the small files of a Hugging Face directory: everything but weights."""
        for source in attachments(model_dir):
            with translated("reading the model directory", source):
                content = source.read_bytes()
            self.write(source.name, content)

    def sizes(self) -> dict[str, int]:
        """Size of every file written so far, by relative path; the lock file is left out."""
        with translated("listing a staged checkpoint", self.path):
            return {
                str(path.relative_to(self.path)): path.stat().st_size
                for path in sorted(self.path.rglob("*"))
                if path.is_file() and path.stat().st_ino != os.fstat(self._lock).st_ino
            }

    def publish(self, marker: bytes) -> Path:
        """Add the READY marker and move the directory to its final name; the path.

        The order survives a crash at any point: files, marker, directory, rename, parent.
        """
        self.write(READY_FILE, marker)
        with translated("publishing a checkpoint", self.final):
            for directory in (*_subdirectories(self.path), self.path):
                sync_path(directory)
            self.path.rename(self.final)
            sync_path(self.final.parent)
        self._unlock()
        return self.final

    def discard(self) -> None:
        """Remove what was staged, as far as that is possible. Idempotent, also once published."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _is_leftover(path: Path) -> bool:
    """Staged by a writer that died, or withdrawn while it was read."""
    withdrawn = _NAME.fullmatch(path.name) and not (path / READY_FILE).exists()
    return path.name.startswith(_STAGING) or bool(withdrawn)


def attachments(model_dir: Path) -> list[Path]:
    """Files of a Hugging Face directory that belong beside weights, without the weights."""
    with translated("reading the model directory", model_dir):
        return [
            path
            for path in sorted(model_dir.iterdir())
            if path.is_file()
            and not path.name.startswith(".")
            and path.name != READY_FILE
            and not _WEIGHTS.fullmatch(path.name)
            and path.stat().st_size <= _ATTACHMENT_BYTES
        ]


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; a single call may write less."""
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _subdirectories(path: Path) -> list[Path]:
    return [child for child in path.iterdir() if child.is_dir()]


def _file_name(run_id: str) -> str:
    """A run id as one path component that is no other run's; readable where possible."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}", run_id):
        return run_id
    return f"run-{hashlib.sha256(run_id.encode()).hexdigest()[:32]}"


def _sort_key(name: str) -> tuple[PolicyVersion, int]:
    match = _NAME.fullmatch(name)
    version, number = (match[1], match[2]) if match else ("e0.s0", None)
    return PolicyVersion.parse(version), int(number or 1)
