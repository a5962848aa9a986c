"""What the processes of a run hold: memory, open files, threads, shared memory."""

import time
from pathlib import Path

import psutil
from shared_memory import orphaned_segments

LOOKS, LOOK_S = 4, 0.5
"""How often, and how many seconds apart."""

PRIVATE = ("Pss_Anon", "Pss_Shmem")
"""Memory of its own and its share of shared memory.

Files are left out: who else maps the same library at the moment is none of this run's doing.
"""


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
        "memory": sum(memory(process.pid, *PRIVATE) for process in processes),
        "files": sum(process.num_fds() for process in processes),
        "shared_memory": sum(shared_mappings(process.pid) for process in processes),
        "orphans": len(orphaned_segments(begun)),
        "threads": sum(process.num_threads() for process in processes),
        "processes": len(processes),
    }


def memory(pid: int, *fields: str) -> int:
    """Bytes of a process, the sum of these fields of smaps_rollup."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = dict(line.split(":") for line in lines[1:])
    return sum(int(found[name].split()[0]) * 1024 for name in fields)


def shared_mappings(pid: int) -> int:
    """Mappings of memory files, of /dev/shm, and of System V segments."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(any(kind in line for kind in ("/memfd:", "/dev/shm/", "/SYSV")) for line in lines)
