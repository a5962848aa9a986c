"""How vLLM's processes begin: forked where that is safe, and watching the server they belong to."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import vllm.v1.engine.core as engine_core
import vllm.v1.engine.utils as engine_utils
import vllm.v1.executor.multiproc_executor as multiproc_executor

from rl_core.interfaces import Placement
from rl_core.rollout import process_watch
from rl_core.rollout.process_output import redirect_output
from rl_rollout_vllm.config import VllmConfig
from rl_rollout_vllm.server_args import QUEUE_SEGMENTS


@contextmanager
def child_processes(fork: bool, setup: Callable[[], None]) -> Iterator[None]:
    """Choose how vLLM starts its processes, for the length of the block.

    vLLM forces `spawn` on cpu and in Ray actors, which imports everything a second time in each
    process. Forking is safe here because the server has used no OpenMP threads and no device.
    """
    if not fork:
        yield
        return
    original = (engine_utils.get_mp_context, engine_core.EngineCoreProc.run_engine_core)
    context = multiprocessing.get_context("fork")

    def run(*args: Any, **kwargs: Any) -> None:
        setup()
        original[1](*args, **kwargs)

    engine_utils.get_mp_context = multiproc_executor.get_mp_context = lambda: context
    engine_core.EngineCoreProc.run_engine_core = staticmethod(run)
    try:
        yield
    finally:
        engine_utils.get_mp_context = multiproc_executor.get_mp_context = original[0]
        engine_core.EngineCoreProc.run_engine_core = staticmethod(original[1])


def child_setup(config: VllmConfig, placement: Placement, scratch: str) -> Callable[[], None]:
    """What the engine's core process does first, when it has been forked from this one."""
    server = os.getpid()

    def setup() -> None:
        process_watch.end_with(server, scratch, QUEUE_SEGMENTS)
        if config.log_dir is not None:
            name = f"vllm-{placement.replica_rank}-engine.log"
            redirect_output(config.log_dir, name, logger="vllm")

    return setup
