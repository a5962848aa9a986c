"""What grows from sync to sync is told from what is made once; `tools/sync_many_times.py` asks."""

import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from whole_runs import ROOT

sys.path.append(str(ROOT / "tools"))

import census
from census import MIB, Census, Holding, growth, table, take_census

FLAT = Holding("worker", memory=100 * MIB, files=10, threads=10, segments=2)


def censuses(*worker, orphans=(0, 0, 0), others=((), (), ())):
    """After 20, 120 and 220 syncs; `others` are the ids of further processes."""
    return [
        Census(syncs, {7: held, **dict.fromkeys(more, FLAT)}, left)
        for syncs, held, left, more in zip((20, 120, 220), worker, orphans, others, strict=True)
    ]


def course(kind, *amounts):
    return [replace(FLAT, **{kind: amount}) for amount in amounts]


@pytest.mark.parametrize(
    "flat",
    [
        course("files", 10, 14, 14),
        course("threads", 10, 12, 11),
        course("memory", 100 * MIB, 200 * MIB, 202 * MIB),
    ],
)
def test_a_plateau_is_flat(flat):
    assert growth(*censuses(*flat)) == []


@pytest.mark.parametrize(
    ("grown", "told"),
    [
        (course("files", 10, 10, 11), "files of worker (pid 7): 10, 10, 11"),
        (course("threads", 10, 110, 210), "threads of worker (pid 7): 10, 110, 210"),
        (course("segments", 2, 3, 4), "segments of worker (pid 7): 2, 3, 4"),
        (
            course("memory", 100 * MIB, 103 * MIB, 106 * MIB),
            "memory of worker (pid 7): 3.0 MiB in the last 100 syncs, 31 KiB each",
        ),
    ],
)
def test_what_grows_is_named_with_its_place(grown, told):
    assert growth(*censuses(*grown)) == [told]


def test_what_the_run_gains_is_named():
    found = growth(
        *censuses(FLAT, FLAT, FLAT, orphans=(1, 1, 3), others=((8,), (8,), (8, 9))),
    )
    assert found == [
        "processes: 2, 2, 3",
        "shared memory that nobody maps: 1, 1, 3",
        "new process: worker (pid 9)",
    ]


def test_a_census_sees_threads_files_and_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(census, "LOOK_S", 0.01)
    begun, stop = time.time(), threading.Event()
    before = take_census(1, begun)
    thread = threading.Thread(target=stop.wait)
    thread.start()
    sleeper = subprocess.Popen(["sleep", "60"])
    with (tmp_path / "file").open("w"):
        after = take_census(2, begun)
    sleeper.kill()
    sleeper.wait()
    stop.set()
    thread.join()
    found = growth(before, before, after)
    [pid] = after.processes.keys() - before.processes
    assert after.processes[pid].name == "sleep"
    kinds = [line.partition(" ")[0].strip(":") for line in found]
    assert kinds == ["processes", "new", "files", "threads"]
    assert f"sleep {pid}" in table(before, before, after)
