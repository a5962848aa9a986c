"""What each process of a run holds, taken several times, and what of it grew.

Of every process: resident memory, open files, threads (all of them, Python's or not) and mappings
of shared memory; of the run: its processes, and shared memory that no living process maps.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import psutil
from holdings import LOOK_S, LOOKS, memory, shared_mappings
from shared_memory import orphaned_segments

MIB, KIB = 1 << 20, 1 << 10
PER_SYNC = 16 * KIB
SLACK = 2 * MIB
"""What the second half may add to the memory of a process: so much per sync, and what allocators
take and keep in one go however few syncs it has."""


@dataclass(frozen=True)
class Holding:
    """What one process holds: memory in bytes, all else counted."""

    name: str
    memory: int
    files: int
    threads: int
    segments: int


COUNTED = ("files", "threads", "segments")


@dataclass(frozen=True)
class Census:
    """What the run holds after so many syncs, by process id."""

    syncs: int
    processes: Mapping[int, Holding]
    orphans: int


def take_census(syncs: int, begun: float) -> Census:
    """Of this process and its descendants: the least of several looks.

    Ray opens connections, starts threads and processes, and lets go of them at any time.

    Args:
        syncs: how many there were.
        begun: seconds since the epoch; shared memory from before belongs to others.
    """
    looks, orphans = [_look()], [len(orphaned_segments(begun))]
    while len(looks) < LOOKS:
        time.sleep(LOOK_S)
        looks.append(_look())
        orphans.append(len(orphaned_segments(begun)))
    stayed = set.intersection(*(set(look) for look in looks))
    processes = {pid: _least([look[pid] for look in looks]) for pid in sorted(stayed)}
    return Census(syncs, processes, min(orphans))


def _look() -> dict[int, Holding]:
    found = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            found[process.pid] = Holding(
                name=_name(process),
                memory=memory(process.pid, "Rss"),
                files=process.num_fds(),
                threads=len(os.listdir(f"/proc/{process.pid}/task")),
                segments=shared_mappings(process.pid),
            )
        except (psutil.NoSuchProcess, OSError):
            continue  # it has just ended
    return found


def _name(process: psutil.Process) -> str:
    """The program; of Ray's workers the class, without the method that it runs."""
    words = process.cmdline() or [process.name()]
    script = next((word for word in words if word.endswith(".py")), words[0])
    return Path(script).name.split(".")[0]


def _least(seen: Sequence[Holding]) -> Holding:
    kinds = ("memory", *COUNTED)
    return Holding(
        seen[-1].name, **{kind: min(getattr(one, kind) for one in seen) for kind in kinds}
    )


def growth(begin: Census, middle: Census, end: Census) -> list[str]:
    """What is not flat, and where; see `tools/sync_many_times.py` for the rule."""
    found = []
    for what, of in _OF_THE_RUN.items():
        counts = [of(census) for census in (begin, middle, end)]
        if _is_more(counts):
            found.append(f"{what}: {_told(counts)}")
    if _is_more([len(census.processes) for census in (begin, middle, end)]):
        new = end.processes.keys() - middle.processes
        found += [f"new process: {end.processes[pid].name} (pid {pid})" for pid in sorted(new)]
    for pid in end.processes:
        seen = [one.processes[pid] for one in (begin, middle, end) if pid in one.processes]
        found += [f"{what} (pid {pid}): {told}" for what, told in _grown_counts(seen)]
        if pid in middle.processes:
            grown, syncs = seen[-1].memory - seen[-2].memory, end.syncs - middle.syncs
            if grown > allowed(syncs):
                amount = f"{grown / MIB:.1f} MiB in the last {syncs} syncs"
                each = f"{grown / syncs / KIB:.0f} KiB each"
                found.append(f"memory of {seen[-1].name} (pid {pid}): {amount}, {each}")
    return found


def _grown_counts(seen: Sequence[Holding]) -> Iterator[tuple[str, str]]:
    for kind in COUNTED:
        counts = [getattr(one, kind) for one in seen]
        if _is_more(counts):
            yield f"{kind} of {seen[-1].name}", _told(counts)


_OF_THE_RUN: dict[str, Callable[[Census], int]] = {
    "processes": lambda census: len(census.processes),
    "shared memory that nobody maps": lambda census: census.orphans,
}


def _is_more(counts: Sequence[int]) -> bool:
    """Whether the last one is more than there ever was before."""
    return len(counts) > 1 and counts[-1] > max(counts[:-1])


def allowed(syncs: int) -> int:
    """Bytes that a process may grow by in so many syncs, after as many others."""
    return max(SLACK, syncs * PER_SYNC)


def _told(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def table(*censuses: Census) -> str:
    """A line for each process and one for all, each figure at every census."""
    head = f"{'after syncs':28} {'resident MiB':>24} {'files':>15} {'threads':>15} {'segments':>15}"
    marks = [str(census.syncs) for census in censuses]
    lines = [head, _row("", [marks] * 4)]
    pids = dict.fromkeys(pid for census in censuses for pid in census.processes)
    for pid in pids:
        seen = [census.processes.get(pid) for census in censuses]
        name = next(one.name for one in seen if one is not None)
        lines.append(_row(f"{name[:20]} {pid}", _cells(seen)))
    lines.append(_row("all", _cells([_sum(census) for census in censuses])))
    counts = {what: [of(census) for census in censuses] for what, of in _OF_THE_RUN.items()}
    return "\n".join([*lines, *(f"{what}: {_told(found)}" for what, found in counts.items())])


def _cells(seen: Sequence[Holding | None]) -> list[list[str]]:
    memories = ["-" if one is None else f"{one.memory / MIB:.1f}" for one in seen]
    counts = [["-" if one is None else str(getattr(one, kind)) for one in seen] for kind in COUNTED]
    return [memories, *counts]


def _row(name: str, cells: Sequence[Sequence[str]]) -> str:
    widths = (8, 5, 5, 5)
    columns = (
        "".join(f"{one:>{w}}" for one in cell) for cell, w in zip(cells, widths, strict=True)
    )
    return " ".join([f"{name:28}", *columns])


def _sum(census: Census) -> Holding:
    kinds = ("memory", *COUNTED)
    sums = {kind: sum(getattr(one, kind) for one in census.processes.values()) for kind in kinds}
    return Holding("all", **sums)
