"""Sync N times and print what the processes hold after a few syncs, and after all of them.

python tests/sync_many_times.py DIRECTORY N [arguments of minirl]
"""

import json
import os
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from rl_harness import started_system
from shared_memory import orphaned_segments

from minirl.process_tree import end_descendants
from rl_core.versions import PolicyVersion

SETTLED = 10
BEGUN = time.time()


def holdings() -> dict[str, int]:
    """What all processes of the run hold together."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {
        "memory": sum(_memory(process.pid) for process in processes),
        "files": sum(process.num_fds() for process in processes),
        "shared_memory": sum(_shared_mappings(process.pid) for process in processes),
        "orphans": len(orphaned_segments(BEGUN)),
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


def main() -> None:
    directory, count = Path(sys.argv[1]), int(sys.argv[2])
    with started_system(directory, *sys.argv[3:]) as system:
        for step in range(SETTLED):
            system.weight_sync.sync(PolicyVersion(1, step), "trained")
        before = holdings()
        for step in range(SETTLED, SETTLED + count):
            system.weight_sync.sync(PolicyVersion(1, step), "trained")
        after = holdings()
    sys.stdout.write(f"{json.dumps(before)}\n{json.dumps(after)}\n")
    sys.stdout.flush()
    end_descendants(5)
    os._exit(0)


if __name__ == "__main__":
    main()
