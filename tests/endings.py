"""Ways to end a run before its time, and what has to be true of its end."""

import os
import signal
import time

import psutil

LIMIT_S = 30


def interrupt(run, number):
    """Send a signal to the whole process group, as a terminal does it, and check the end."""
    began = time.monotonic()
    os.killpg(run.process.pid, number)
    _check_end(run, began, 128 + number)
    name = signal.Signals(number).name
    assert len([line for line in run.lines if f"interrupted by {name}" in line]) == 1
    assert run.summary["status"] == "interrupted"


def kill_engine(run):
    """Kill a process of the engine, and check that the run ends with the cause."""
    began = time.monotonic()
    os.kill(_engine_process(run), signal.SIGKILL)
    _check_end(run, began, 1)
    causes = [line for line in run.lines if "Run failed" in line]
    assert len(causes) == 1, run.log
    # In the middle of a sync it is the actor rank feeding the engine that notices.
    assert "replica 0" in causes[0] or "engine" in causes[0]
    assert run.summary["status"] == "failed"


def _check_end(run, began, code):
    run.finish(LIMIT_S)
    assert time.monotonic() - began <= LIMIT_S
    assert run.code == code, run.log
    assert run.left() == []
    assert "Traceback" not in run.log


def _engine_process(run):
    """A process that the rollout server started."""
    names = {pid: psutil.Process(pid).cmdline() for pid in run.processes()}
    hosts = [pid for pid, line in names.items() if any("ObjectHost" in part for part in line)]
    children = [child.pid for pid in hosts for child in psutil.Process(pid).children()]
    assert children, names
    return children[0]
