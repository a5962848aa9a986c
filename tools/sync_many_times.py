"""Sync N times, and tell whether what the processes hold stays flat.

    uv run tools/sync_many_times.py DIRECTORY N [arguments of minirl]

The figures of `tools/census.py` are taken after the first 20 syncs, in the middle of the N that
follow, and after the last one, and printed as a table. Exit code 1, with a line for each thing that
grew and the process that it grew in, unless the second half is flat, by this rule:

- what can be counted (open files, threads, mappings of shared memory, processes, shared memory that
  nobody maps) is at the end no more than it was at the beginning or in the middle;
- the resident memory of each process grew by at most 16 KiB per sync from the middle to the end,
  or by 2 MiB, where that is more: allocators take their memory in pieces.

So what is made once and kept, in the first half, is a plateau and passes; what is made again and
again is more at the end than in the middle. The smallest leak of memory that N syncs can show is
4 MiB / N per sync (20 KiB of 200); the last line says it.
"""

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from census import KIB, allowed, growth, table, take_census

from minirl.bounded import Ending
from minirl.business_log import ConsoleHandler, LogServer, attach
from minirl.config import load_config
from minirl.plan import make_plan
from minirl.process_tree import become_subreaper, end_descendants
from minirl.ray_cluster import ray_session, session_directory
from minirl.run_output import RunOutput
from minirl.system import RLSystem
from minirl.worker_process import ProcessSettings
from rl_core.channel import new_key
from rl_core.versions import PolicyVersion

SETTLED = 20
BEGUN = time.time()
ENDING = Ending()


@contextlib.contextmanager
def started_system(directory: Path, *arguments: str) -> Iterator[RLSystem]:
    """A system as the app starts it, for the length of the block; its log is on stderr."""
    plan = make_plan(load_config(arguments))
    become_subreaper()
    attach(ConsoleHandler())
    log_server = LogServer(new_key(), None)
    settings = ProcessSettings(str(directory / "logs"), log_server.address)
    with (
        session_directory(plan.config.cluster) as scratch,
        ray_session(plan.config.cluster, plan.device, plan.slots, scratch, ENDING),
        RunOutput(directory, plan.config) as output,
    ):
        system = RLSystem(plan, settings)
        try:
            system.start(output, secrets.token_hex(4))
            yield system
        finally:
            system.shutdown()


def main() -> None:
    """Start a system, sync, print, end."""
    directory, count = Path(sys.argv[1]), int(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    taken, step = [], 0
    with started_system(directory, *sys.argv[3:]) as system:
        for due in (SETTLED, SETTLED + count // 2, SETTLED + count):
            while step < due:
                system.weight_sync.sync(PolicyVersion(1, step), "trained")
                step += 1
            taken.append(take_census(step, BEGUN))
    grown = growth(*taken)
    rest = count - count // 2
    smallest = f"{allowed(rest) / rest / KIB:.0f} KiB of memory per sync in one process"
    verdict = [f"GREW: {line}" for line in grown] or [f"flat; up to {smallest} would not show"]
    sys.stdout.write("\n".join([table(*taken), *verdict, ""]))
    sys.stdout.flush()
    end_descendants(ENDING)
    os._exit(1 if grown else 0)


if __name__ == "__main__":
    main()
