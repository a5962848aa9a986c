"""Sync N times and print what the processes hold after a few syncs, and after all of them.

uv run tools/sync_many_times.py DIRECTORY N [arguments of minirl]
"""

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from holdings import holdings

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

SETTLED = 10
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
    with started_system(directory, *sys.argv[3:]) as system:
        for step in range(SETTLED):
            system.weight_sync.sync(PolicyVersion(1, step), "trained")
        before = holdings(BEGUN)
        for step in range(SETTLED, SETTLED + count):
            system.weight_sync.sync(PolicyVersion(1, step), "trained")
        after = holdings(BEGUN)
    sys.stdout.write(f"{json.dumps(before)}\n{json.dumps(after)}\n")
    sys.stdout.flush()
    end_descendants(ENDING)
    os._exit(0)


if __name__ == "__main__":
    main()
