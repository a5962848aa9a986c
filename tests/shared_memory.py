"""Shared memory, and which living processes map it."""

import os
from collections.abc import Iterable
from pathlib import Path


def orphaned_segments(since: float) -> list[str]:
    """Shared memory made since then that no living process maps."""
    candidates = [path for path in Path("/dev/shm").iterdir() if _changed(path) >= since]
    mapped = mapped_segments(pids()) if candidates else []
    return [str(path) for path in candidates if path not in mapped and path.exists()]


def mapped_segments(pids: Iterable[int]) -> list[Path]:
    """Files in /dev/shm that these processes map, under whatever name they were mapped.

    Semaphores get their name only after that.
    """
    lines = [line.split() for pid in pids for line in _maps(pid).splitlines()]
    inodes = {int(line[4]) for line in lines if len(line) > 5 and line[5].startswith("/dev/shm/")}
    return [path for path in Path("/dev/shm").iterdir() if _inode(path) in inodes]


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
