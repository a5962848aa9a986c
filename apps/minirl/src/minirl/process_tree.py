"""The processes that a run started: counted, measured, and none of them left behind."""

import ctypes
import logging
import os
import threading
import time
from types import TracebackType

import psutil

from minirl.bounded import Ending

_GRACE_S = 3.0
_KILLED_S = 5.0
_KILLED_AT_LEAST_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36
_logger = logging.getLogger(__name__)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that they can be found and ended.

    Engines start processes of their own; when their parent is killed, the kernel hands them to
    the nearest subreaper (Linux, prctl(2)) instead of to init.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Every living process below this one."""
    return psutil.Process().children(recursive=True)


def is_running(name: str) -> bool:
    """Whether a living descendant has that process name."""
    return any(_name(process) == name for process in descendants())


def _name(process: psutil.Process) -> str:
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.name()
    except psutil.NoSuchProcess:
        return ""


def end_descendants(ending: Ending) -> int:
    """Ask all descendants to end, kill those that are left after a moment.

    Those that are killed get a moment to vanish, also where `ending` is over by then.

    Returns:
        How many had to be killed.
    """
    _signal_all(descendants(), "terminate")
    _wait_gone(ending.at_most(_GRACE_S))
    left = descendants()
    _signal_all(left, "kill")
    _wait_gone(max(_KILLED_AT_LEAST_S, ending.at_most(_KILLED_S)))
    return len(left)


def _signal_all(processes: list[psutil.Process], method: str) -> None:
    for process in processes:
        try:
            getattr(process, method)()
        except psutil.NoSuchProcess:
            continue


def _wait_gone(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _reap_zombies()
        if not descendants():
            return
        time.sleep(0.05)


def _reap_zombies() -> None:
    for process in psutil.Process().children():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue


def memory_pss() -> int:
    """Proportional set size, in bytes, of this process and all its descendants.

    Shared pages are counted once over all processes (proc(5), smaps_rollup).
    """
    pids = [os.getpid(), *(process.pid for process in descendants())]
    return sum(_pss(pid) for pid in pids)


def _pss(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return 0
    return 0


class MemoryWatch:
    """Samples the memory of the whole process tree in a thread and keeps the peak."""

    def __init__(self, every_s: float = 5.0) -> None:
        self.peak_bytes = 0
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            try:
                self.peak_bytes = max(self.peak_bytes, memory_pss())
            except psutil.Error as error:
                _logger.debug("memory not sampled: %s", error)
            if self._stop.wait(self._every_s):
                return
