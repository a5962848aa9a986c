"""Whether the names of Ray's sockets fit: they lie deep below the temporary directory."""

import os
import tempfile

from rl_core.errors import ConfigError

_LONGEST = 107
"""Bytes that the name of a Unix socket may have."""
_BELOW = "/minirl-ray-12345678/session_2026-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""The longest one, as a local Ray of a run names it."""

REMEDY = "set TMPDIR to a shorter path, such as /tmp"


def room() -> int:
    """Bytes that the name of the temporary directory may have."""
    return _LONGEST - len(_BELOW.format(pid=os.getpid()))


def fits(directory: str) -> bool:
    """Whether a local Ray can have its sockets below a directory."""
    return len(os.fsencode(directory)) <= room()


def check_temporary_directory() -> None:
    """ConfigError if a local Ray could not have its sockets."""
    path = tempfile.gettempdir()
    if not fits(path):
        msg = f"TMPDIR={path}: at most {room()} bytes leave room for the names of Ray's sockets"
        raise ConfigError(f"{msg}; {REMEDY}")
