"""Locks by which readers and writers of directories know of each other, across processes.

They are `flock` locks on a file inside the directory: the kernel drops them when the process that
holds them ends, however it ends, so that nothing has to be cleaned up. The file system must
support them (local ones do; NFS since Linux 2.6.12; Lustre with `-o flock`).
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from rl_core.errors import TransferError

LEASE_FILE = ".lease"


class DirectoryLease:
    """A shared lock on a directory: as long as it is held, nobody removes it."""

    def __init__(self, path: Path) -> None:
        """Lock the directory; FileNotFoundError if it has gone, or is just being removed."""
        self.path = path
        self._fd = os.open(path / LEASE_FILE, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # It may have been moved away between the two calls above.
            if not os.path.samestat(os.fstat(self._fd), (path / LEASE_FILE).stat()):
                raise FileNotFoundError(f"{path} was replaced while it was being opened")
        except BlockingIOError as error:
            self.release()
            raise FileNotFoundError(f"{path} is being removed") from error
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Unlock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def own(path: Path) -> int:
    """Make the lock file of a new directory and lock it for oneself; its descriptor."""
    fd = os.open(path / LEASE_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        msg = f"the file system of {path} has no flock locks; set another root_dir"
        raise TransferError(msg) from error
    return fd


@contextlib.contextmanager
def unless_in_use(path: Path) -> Iterator[bool]:
    """Lock a directory for removal: yields whether nobody uses it."""
    try:
        fd = os.open(path / LEASE_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # one that was never finished, or is gone
        yield path.is_dir()
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)
