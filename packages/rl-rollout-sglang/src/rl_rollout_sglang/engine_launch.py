"""Starts an SGLang engine from our configuration; imported in the server process only."""

import asyncio
import os
import signal
import tempfile

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from rl_core.errors import ConfigError, LifecycleError
from rl_core.interfaces import Placement
from rl_core.rollout.engine_arguments import check_known
from rl_rollout_sglang import engine_processes
from rl_rollout_sglang.config import SglangConfig
from rl_rollout_sglang.engine_processes import LaunchedEngine, ProcessSetup
from rl_rollout_sglang.scheduler_link import SchedulerLink
from rl_rollout_sglang.server_args import server_args
from rl_rollout_sglang.server_env import threads

GRACE_S = 2.0
"""Seconds for the last words of a dying process to be written."""


async def launch(
    config: SglangConfig, placement: Placement, scratch: str
) -> tuple[LaunchedEngine, SchedulerLink, ProcessSetup]:
    """A running engine, the link that its schedulers will connect to, and how they were set up.

    Blocks the event loop while the processes come up; see `SglangEngine.start`.
    """
    args = _arguments(config, placement)
    link = SchedulerLink(placement.tp_size)
    setup = _setup(config, placement, scratch, link)
    launcher = LaunchedEngine.configured(setup, _start_method(config, placement))
    tempfile.tempdir = scratch  # where SGLang puts its sockets
    try:
        with engine_processes.root_logger_kept():
            engine_processes.ignore_quit_signal()
            engine = launcher(server_args=args)
    except Exception as error:
        # Edge of the engine: a process that fails at the start says so in many ways.
        link.close()
        await asyncio.sleep(GRACE_S)
        words = engine_processes.last_words(scratch)
        raise LifecycleError(f"SGLang did not start: {error}\n{words}") from error
    finally:
        tempfile.tempdir = None
    return engine, link, setup


def _setup(
    config: SglangConfig, placement: Placement, scratch: str, link: SchedulerLink
) -> ProcessSetup:
    return ProcessSetup(
        server=os.getpid(),
        scratch=scratch,
        replica_rank=placement.replica_rank,
        log_dir=config.log_dir,
        threads=threads(config, placement.tp_size) if placement.device == "cpu" else None,
        address=link.address,
        key=link.key,
    )


def _start_method(config: SglangConfig, placement: Placement) -> str:
    if config.start_method != "auto":
        return config.start_method
    return "fork" if placement.device == "cpu" else "spawn"


def _arguments(config: SglangConfig, placement: Placement) -> ServerArgs:
    # On the main thread SGLang sets a handler of its own while it starts; this one does nothing.
    args = server_args(config, placement) | {"custom_sigquit_handler": signal.SIG_IGN}
    known = [name for name in ServerArgs.__struct_fields__ if not name.startswith("_")]
    check_known(config.engine_kwargs, known)
    load_plugins()
    try:
        return ServerArgs(**{key: value for key, value in args.items() if key in known})
    except Exception as error:
        # Edge of the engine: settings are refused by many kinds of errors.
        raise ConfigError(f"SGLang refuses the rollout configuration: {error}") from error
