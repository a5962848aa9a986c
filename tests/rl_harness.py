"""An `RLSystem` for scripts that drive the parts of a run themselves."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from minirl.business_log import ConsoleHandler, LogServer, attach
from minirl.config import load_config
from minirl.plan import make_plan
from minirl.process_tree import become_subreaper
from minirl.ray_cluster import ray_session, session_directory
from minirl.run_output import RunOutput
from minirl.system import RLSystem
from minirl.worker_process import ProcessSettings
from rl_core.channel import new_key


@contextlib.contextmanager
def started_system(directory: Path, *arguments: str) -> Iterator[RLSystem]:
    """A system as the app starts it, for the length of the block; its log is on stderr."""
    plan = make_plan(load_config(arguments))
    become_subreaper()
    attach(ConsoleHandler())
    log_server = LogServer(new_key(), None)
    settings = ProcessSettings(str(directory / "logs"), log_server.address)
    with (
        session_directory(plan.config.cluster) as directory,
        ray_session(plan.config.cluster, plan.device, plan.slots, directory),
        RunOutput(directory, plan.config) as output,
    ):
        system = RLSystem(plan, settings)
        try:
            system.start(output, secrets.token_hex(4))
            yield system
        finally:
            system.shutdown()
