"""Do the processes of a Ray that this run has started still live?

Ray itself takes a minute to notice that its head is gone, and then ends the driver at once: no
cause is told, no summary is written. So whoever waits for a result asks here.
"""

import psutil

from minirl.process_tree import descendants

_NAMES = ("gcs_server", "raylet")

_watched: dict[str, psutil.Process] = {}


def watch() -> None:
    """Remember the processes of the local Ray that has just been started."""
    for process in descendants():
        name = process.name()
        if name in _NAMES:
            _watched[name] = process


def forget() -> None:
    """Watch nothing any more: Ray is about to be shut down."""
    _watched.clear()


def dead() -> str | None:
    """Name of a process that should live and does not, or None."""
    return next((name for name, process in _watched.items() if not _lives(process)), None)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
