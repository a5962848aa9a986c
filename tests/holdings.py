"""What the processes of a run hold: memory, open files, threads, shared memory."""

import time
from pathlib import Path

import psutil
from shared_memory import orphaned_segments

LOOKS, LOOK_S = 4, 0.5
"""How often, and how many seconds apart."""


def holdings(begun: float) -> dict[str, int]:
    """What this process and its descendants hold together, whatever else they are doing.

    The least of several looks: Ray opens connections and lets go of them at any time.

    Args:
        begun: seconds since the epoch; shared memory from before belongs to others.
    """
    looks = [_holdings(begun)]
    while len(looks) < LOOKS:
        time.sleep(LOOK_S)
        looks.append(_holdings(begun))
    return {name: min(look[name] for look in looks) for name in looks[0]}


def _holdings(begun: float) -> dict[str, int]:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {
        "memory": sum(_memory(process.pid) for process in processes),
        "files": sum(process.num_fds() for process in processes),
        "shared_memory": sum(_shared_mappings(process.pid) for process in processes),
        "orphans": len(orphaned_segments(begun)),
        "threads": sum(process.num_threads() for process in processes),
        "processes": len(processes),
    }


def _memory(pid: int) -> int:
    """Bytes of its own and its share of shared memory.

    Files are left out: who else maps the same library at the moment is none of this run's doing.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = dict(line.split(":") for line in lines[1:])
    return sum(int(found[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))


def _shared_mappings(pid: int) -> int:
    """Mappings of memory files and of /dev/shm."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("/memfd:" in line or "/dev/shm/" in line for line in lines)
