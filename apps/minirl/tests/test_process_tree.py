"""Ending what a run has started."""

import subprocess

import psutil

from minirl import process_tree
from minirl.bounded import Ending
from minirl.process_tree import end_descendants


def test_what_does_not_end_is_killed_though_the_time_is_up(monkeypatch):
    """The end of the run waits until it is gone: it could still write into a directory."""
    program = "trap '' TERM; echo; exec sleep 60"
    with subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        started = psutil.Process(process.pid)
        monkeypatch.setattr(
            process_tree, "descendants", lambda: [started] if started.is_running() else []
        )
        assert end_descendants(Ending(0.0)) == 1
        assert not started.is_running()
