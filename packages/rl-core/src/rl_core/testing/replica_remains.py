"""What a running replica has that must not survive it: processes, shared memory, scratch files."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

GONE_S = 15.0
"""Seconds in which all of it has to be gone."""


class ReplicaRemains:
    """Taken while the replica runs; asked after its end."""

    def __init__(self, state: Any) -> None:
        """`state` is what the server says of itself (`live_state`)."""
        server = psutil.Process(state["pid"])
        self.processes = [server, *server.children(recursive=True)]
        self.workers = [worker["pid"] for worker in state["workers"]]
        self.files = {Path(state["scratch"]), *self._shared()}

    def left(self) -> tuple[list[psutil.Process], list[Path]]:
        """Processes that run, and files that exist."""
        alive = [item for item in self.processes if item.is_running() and not is_zombie(item)]
        return alive, sorted(path for path in self.files if path.exists())

    def assert_gone(self) -> None:
        """AssertionError unless nothing is left within `GONE_S`."""
        end = time.monotonic() + GONE_S
        while any(self.left()) and time.monotonic() < end:
            time.sleep(0.05)
        assert self.left() == ([], [])

    def _shared(self) -> Iterator[Path]:
        for process in self.processes:
            for mapping in process.memory_maps():
                path = mapping.path.removesuffix(" (deleted)")
                if path.startswith("/dev/shm/"):
                    yield Path(path)


def is_zombie(process: psutil.Process) -> bool:
    """Whether a process has ended and nobody has asked how; also if it is gone altogether."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
