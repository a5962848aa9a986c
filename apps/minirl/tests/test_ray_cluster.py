"""What Ray does to this process, and what is left of it."""

import ctypes
import signal
import time
from pathlib import Path

import pytest

from minirl import ray_cluster
from minirl.interruption import uninterrupted
from minirl.ray_cluster import leave


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
        leave()
        assert is_ignored(signal.SIGTERM)
    assert len(seen) == 1
    assert seen[0] or not busy_s  # also while the shutdown goes on
