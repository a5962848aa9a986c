"""Ends an engine process when the server process that owns it is gone, however it went.

Engines' own processes notice the death of their parent only at the next message, if at all.
"""

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import threading
import time
from pathlib import Path

POLL_S = 0.5

PR_SET_PDEATHSIG = 1


def end_with(pid: int, scratch: str | None = None, segments: str = "") -> None:
    """Watch process `pid` from a thread; when it ends, remove `scratch` and end this process.

    Args:
        pid: the server process.
        scratch: directory of the server's sockets, or None to leave it.
        segments: pattern of the names below /dev/shm of shared memory that the engine removes in
            an orderly end only; what this process maps of it is removed. Empty for none.
    """
    parent = os.getppid()
    victims = [os.getpid()] if parent == pid else [parent, os.getpid()]
    arguments = (pid, scratch, segments, victims)
    threading.Thread(target=_watch, args=arguments, name="rl-watch", daemon=True).start()


def outlive_parent() -> None:
    """Take back, for the calling thread, that the kernel kills this process with its parent.

    For engines that ask for that: nothing of what `end_with` does would be done then.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)


def _watch(pid: int, scratch: str | None, segments: str, victims: list[int]) -> None:
    _wait_for_end(pid)
    if segments:
        unlink_segments(segments)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    for victim in victims:
        # A parent that has ended already was replaced by a reaper, which is not ours to end.
        if victim in (os.getpid(), os.getppid()):
            os.kill(victim, signal.SIGKILL)


def unlink_segments(names: str) -> None:
    """Take their names from shared memory that this process maps, as far as they match `names`.

    Who has mapped it goes on using it, and nothing is left when the last of them ends.
    """
    maps = Path("/proc/self/maps").read_text()
    for name in set(re.findall(rf"/dev/shm/(?:{names})\S*", maps)):
        with contextlib.suppress(OSError):
            os.unlink(name)


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # a kernel or sandbox without pidfd
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(pid, 0)
                time.sleep(POLL_S)
        return
    select.select([descriptor], [], [])
