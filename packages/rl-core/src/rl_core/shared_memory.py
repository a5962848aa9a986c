"""Memory shared between processes of one host, which cannot be left behind.

A buffer is an anonymous file (memfd): it has no name, needs no /dev/shm of a certain size, and is
gone when the last process that holds it ends, however it ends. Its descriptor travels over a Unix
socket (`Channel.send_fd`).
"""

import errno
import mmap
import os
from types import TracebackType

from rl_core.errors import TransferError


class SharedBuffer:
    """A block of shared memory, mapped for reading and writing in this process."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `nbytes` of the descriptor, which this object then owns."""
        self.fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes)

    @classmethod
    def create(cls, nbytes: int, label: str = "minirl") -> "SharedBuffer":
        """Allocate now, so that a lack of memory shows here and not at a later write.

        Errors: TransferError naming the size and the remedy.
        """
        fd = os.memfd_create(label, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            msg = (
                f"no memory for a shared buffer of {nbytes} bytes; free some, or lower "
                "checkpoint_engine.update_weights_bucket_megabytes"
            )
            raise TransferError(msg) from error

    @property
    def view(self) -> memoryview:
        """The bytes, writable."""
        return memoryview(self._map)

    def close(self) -> None:
        """Give up this process's hold. Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self._map.close()
        except BufferError:
            # Tensors still look at the mapping; it goes with the last of them.
            del self._map

    def __enter__(self) -> "SharedBuffer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
