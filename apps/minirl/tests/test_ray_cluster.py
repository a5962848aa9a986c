"""What Ray does to this process, and what is left of it."""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from minirl import interruption, ray_cluster
from minirl.bounded import Ending
from minirl.config import ClusterConfig
from minirl.interruption import Interrupted, interrupting, uninterrupted
from minirl.ray_cluster import leave, ray_session


def is_ignored(number):
    """By the kernel, which is what counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigIgn"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("busy_s", [0.0, 0.2])
def test_a_run_that_ends_is_not_killed_by_a_signal_after_rays_shutdown(monkeypatch, busy_s):
    """`RayLog::UninstallSignalAction` is sigaction(SIGTERM, SIG_DFL) behind Python's back."""
    seen = []

    def shutdown():
        ctypes.CDLL(None).signal(signal.SIGTERM, None)
        time.sleep(busy_s)
        seen.append(is_ignored(signal.SIGTERM))

    monkeypatch.setattr(ray_cluster.ray, "shutdown", shutdown)
    with uninterrupted():
        leave(Ending())
        assert is_ignored(signal.SIGTERM)
    assert len(seen) == 1
    assert seen[0] or not busy_s  # also while the shutdown goes on


def takes_sigterm():
    """As `ray.init` does it, before it starts anything."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)


def loses_its_processes():
    """They had the signal, too, and Ray notices."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    raise RuntimeError("the GCS has exited")


def waits_in_vain():
    """They had the signal, too, and Ray waits for them for a minute."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)


@pytest.mark.parametrize(
    ("start", "left"), [(takes_sigterm, 1), (loses_its_processes, 1), (waits_in_vain, 0)]
)
def test_a_signal_while_ray_starts_interrupts_the_run(monkeypatch, tmp_path, start, left):
    shutdowns = []
    monkeypatch.setattr(interruption, "_state", interruption._State())
    monkeypatch.setattr(ray_cluster, "_GIVE_UP_S", 0.5)
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **_: start())
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: shutdowns.append(1))
    began = time.monotonic()
    session = ray_session(ClusterConfig(), "cpu", 1, tmp_path, Ending())
    with pytest.raises(Interrupted, match="SIGTERM"), interrupting(), session:
        pytest.fail("it began all the same")
    assert time.monotonic() - began < 10
    assert len(shutdowns) == left


def test_what_keeps_ray_from_starting_is_told(monkeypatch, tmp_path):
    def fail(**_):
        raise RuntimeError("no port is free")

    monkeypatch.setattr(ray_cluster.ray, "init", fail)
    session = ray_session(ClusterConfig(), "cpu", 1, tmp_path, Ending())
    with pytest.raises(RuntimeError, match="no port"), session:
        pytest.fail("it began all the same")
