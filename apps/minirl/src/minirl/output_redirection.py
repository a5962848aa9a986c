"""Keeps what libraries print out of the business log."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def redirected_output(path: Path) -> Iterator[TextIO]:
    """Send everything that is written to stdout or stderr, also by native code, into `path`.

    Yields:
        The original stderr, for the business log and the progress view.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd in saved:
        os.dup2(target, fd)
    os.close(target)
    console = os.fdopen(os.dup(saved[2]), "w", buffering=1)
    try:
        yield console
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, original in saved.items():
            os.dup2(original, fd)
            os.close(original)
        with contextlib.suppress(BrokenPipeError):
            console.close()
