"""An engine process ends with the server that owns it, however that went."""

import os
import signal
import subprocess
import sys
import time

WATCHER = """
import os, sys, time
from rl_core.rollout.process_watch import end_with
end_with(int(sys.argv[1]), sys.argv[2])
print("watching", flush=True)
time.sleep(60)
"""


def gone(process, seconds=10.0):
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    return process.poll()


def test_the_watcher_dies_with_its_server_and_removes_its_scratch(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "socket").touch()
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    program = [sys.executable, "-c", WATCHER, str(server.pid), str(scratch)]
    # The watcher's parent is this process, which must survive: it stands for an engine core
    # that has ended and been replaced by a reaper.
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({program!r})"],
        stdout=subprocess.PIPE,
    )
    assert launcher.stdout.readline() == b"watching\n"
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert gone(launcher) == -signal.SIGKILL
    assert not scratch.exists()
