"""Keeping a process and everything it starts together, so that all of it ends (Linux).

A launched process is two: a *supervisor*, which does nothing but wait, and the *worker* it forks.
The supervisor is a sub-reaper: whatever the worker starts, daemonised or not, becomes its child
once orphaned. It ends all of it when it is told to (SIGTERM), when the worker ends, and when the
process that launched it dies.
"""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

from rl_core.errors import LifecycleError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)

ORPHANS_S = 3.0
"""Seconds in which what a dead worker leaves may end by itself, and clear away after it."""


def supervise(parent: int) -> None:
    """Fork; return in the worker, never in the supervisor. Call before starting any thread.

    Args:
        parent: pid of the process whose death ends this one.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    die_with_parent(parent, signal.SIGTERM)
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        die_with_parent(supervisor, signal.SIGKILL)
        return
    code = _wait(worker)
    told = code == 128 + signal.SIGTERM
    _end_children(time.monotonic() + (0.0 if told else ORPHANS_S))
    os._exit(code)


def die_with_parent(parent: int, with_signal: int) -> None:
    """Have the kernel send a signal to this process when its parent (thread) ends."""
    _prctl(_PR_SET_PDEATHSIG, with_signal)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which `pid` started, None if there is none: tells reused pids."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def _wait(worker: int) -> int:
    """Block until the worker ended (its exit code) or SIGTERM came."""
    # Waits without a deadline on purpose: the supervisor lives as long as the worker.
    while True:
        if signal.sigwait(_SIGNALS) == signal.SIGTERM:
            return 128 + signal.SIGTERM
        for pid, status in _reaped():
            if pid == worker:
                return max(os.waitstatus_to_exitcode(status), 0)


def _reaped() -> list[tuple[int, int]]:
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def _end_children(kill_at: float) -> None:
    # Orphans of a killed child become ours, so this goes on until nothing is left.
    while _children():
        if time.monotonic() < kill_at:
            _reaped()
            time.sleep(0.02)
            continue
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _children() -> list[int]:
    me = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise LifecycleError(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")
