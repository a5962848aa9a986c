"""The environment of a replica's server process and of everything that it starts."""

import os

from rl_core.interfaces import Placement
from rl_rollout_vllm.config import VllmConfig

VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def server_env(config: VllmConfig, placement: Placement) -> dict[str, str]:
    """Variables to add, before the interpreter starts."""
    env = {
        "VLLM_LOGGING_LEVEL": config.log_level,
        "VLLM_NO_USAGE_STATS": "1",
        # Its paths would change weights behind the adapter's back, whatever the gate thinks.
        "VLLM_SERVER_DEV_MODE": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.log_dir is not None:
        env["VLLM_CONFIGURE_LOGGING"] = "0"
    if placement.device == "cpu":
        return env | _cpu(config, placement)
    if placement.visible_devices:
        env[VISIBLE_DEVICES[placement.device]] = ",".join(placement.visible_devices)
    return env


def threads(config: VllmConfig, tp_size: int) -> int:
    """Compute threads of an engine rank on cpu."""
    if config.cpu_threads is not None:
        return config.cpu_threads
    return max(1, len(os.sched_getaffinity(0)) // tp_size)


def _cpu(config: VllmConfig, placement: Placement) -> dict[str, str]:
    env = {
        # One process less; the engine's core still has a process of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(threads(config, placement.tp_size)),
        # vLLM binds rank N to NUMA node N and gives up where there are more ranks than nodes.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if config.engine_kwargs.get("enforce_eager", True):
        # Sampling calls torch.compile even in eager mode: 15 s at the first request.
        env["TORCHDYNAMO_DISABLE"] = "1"
    return env
