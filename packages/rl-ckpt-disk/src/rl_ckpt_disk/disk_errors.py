"""What the operating system says about a disk, in this project's words."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_core.errors import TransferError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ENODEV)


@contextmanager
def translated(what: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a TransferError that says what to do.

    Args:
        what: what was being done, such as `writing a checkpoint`.
        path: where.
    """
    try:
        yield
    except TransferError:  # it is an OSError too, and says everything already
        raise
    except OSError as error:
        raise TransferError(f"{what} in {path}: {_explained(error)}") from error


def _explained(error: OSError) -> str:
    reason = f"{error.strerror or error}"
    if error.errno in _FULL:
        return f"{reason}; free some space, lower keep_last, or set another root_dir"
    if error.errno in _CLOSED:
        return f"{reason}; set a root_dir that this process may write and read"
    if error.errno in _GONE:
        gone = f" ({error.filename})" if error.filename else ""
        return f"{reason}{gone}; the directory has vanished, or this host does not see it"
    return reason
