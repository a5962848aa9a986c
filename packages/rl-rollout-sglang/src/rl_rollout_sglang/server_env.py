"""The environment of a replica's server process and of everything that it starts."""

import os

from rl_core.interfaces import Placement
from rl_rollout_sglang.config import SglangConfig

VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}

CPU_PLUGIN = "RL_ROLLOUT_SGLANG_CPU"
"""Variable without which `cpu_plugin` does nothing: an SGLang that somebody else starts in this
environment computes as it always did."""


def server_env(config: SglangConfig, placement: Placement) -> dict[str, str]:
    """Variables to add, before the interpreter starts."""
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
        # Asked for its health, SGLang would generate a token, which a pause holds up.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    if placement.device == "cpu":
        return env | _cpu(config, placement)
    if placement.visible_devices:
        env[VISIBLE_DEVICES[placement.device]] = ",".join(placement.visible_devices)
    return env


def threads(config: SglangConfig, tp_size: int) -> int:
    """Compute threads of an engine rank on cpu."""
    if config.cpu_threads is not None:
        return config.cpu_threads
    return max(1, len(os.sched_getaffinity(0)) // tp_size)


def core_lists(cores: list[int], ranks: int) -> str:
    """Cores of each rank as SGLang takes them (`0,1|2,3`); shared where there are too few."""
    share = max(1, len(cores) // ranks)
    starts = [rank * share % len(cores) for rank in range(ranks)]
    return "|".join(",".join(map(str, cores[start : start + share])) for start in starts)


def _cpu(config: SglangConfig, placement: Placement) -> dict[str, str]:
    # SGLang gives rank N the cores of NUMA node N and dies where there are more ranks than nodes.
    cores = core_lists(sorted(os.sched_getaffinity(0)), placement.tp_size)
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": cores} if placement.tp_size > 1 else {}
    return bound | {
        CPU_PLUGIN: "1",
        "OMP_NUM_THREADS": str(threads(config, placement.tp_size)),
        # Sampling with a seed calls torch.compile, for many seconds at the first request.
        "TORCHDYNAMO_DISABLE": "1",
        # With a CUDA build of torch SGLang opens NCCL for ranks on cpu too, and dies of it;
        # a library that cannot be opened makes it use gloo alone.
        "SGLANG_NCCL_SO_PATH": "/nonexistent/libnccl.so",
    }
