"""Keeps what libraries print out of the business log."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

_NOTE = "the trace is in "


@contextlib.contextmanager
def redirected_output(path: Path) -> Iterator[TextIO]:
    """Send everything that is written to stdout or stderr, also by native code, into `path`.

    The trace of an error that leaves the block, too: see `where_traced`.

    Yields:
        The original stderr, for the business log and the progress view.
    """
    _flush()
    saved = {fd: os.dup(fd) for fd in (1, 2)}
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd in saved:
        os.dup2(target, fd)
    os.close(target)
    console = os.fdopen(os.dup(saved[2]), "w", buffering=1)
    try:
        yield console
    except Exception as error:
        with contextlib.suppress(OSError):  # a full disk must not take the error's place
            traceback.print_exc()
            error.add_note(f"{_NOTE}{path}")
        raise
    finally:
        _empty_streams(tuple(saved))
        for fd, original in saved.items():
            os.dup2(original, fd)
            os.close(original)
        with contextlib.suppress(BrokenPipeError):
            console.close()


def where_traced(error: BaseException) -> str | None:
    """Where `redirected_output` has written the trace of an error, in words; None if nowhere."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note for note in notes if note.startswith(_NOTE)), None)


def _empty_streams(descriptors: Sequence[int]) -> None:
    """Flush what was printed; drop what a full disk does not take: it is not for the terminal."""
    try:
        _flush()
    except OSError:
        with open(os.devnull, "wb") as nowhere:
            for fd in descriptors:
                os.dup2(nowhere.fileno(), fd)
        _flush()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
