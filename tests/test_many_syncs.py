"""A hundred syncs leave memory, open files and shared memory as they were."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parent / "sync_many_times.py"


def test_a_hundred_syncs_leave_no_trace(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "100"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    assert after["processes"] == before["processes"]
    assert after["threads"] <= before["threads"] + 10  # Ray's pools breathe
    assert after["files"] <= before["files"]
    assert after["orphans"] <= before["orphans"]
    assert after["shared_memory"] <= before["shared_memory"]
    # Allocators settle in the first syncs; a leak of one bucket a sync would be 400 MB.
    assert after["memory"] - before["memory"] <= 40e6
