"""The environment of a replica's server process and of everything that it starts."""

import os

from rl_core.interfaces import Placement
from rl_rollout_sglang.config import SglangConfig

VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}

CPU_PLUGIN = "RL_ROLLOUT_SGLANG_CPU"
"""Variable with the number of an engine's ranks on cpu. Without it `cpu_plugin` does nothing: an
SGLang that somebody else starts in this environment computes as it always did."""

ENGINE_SEED = "RL_ROLLOUT_SGLANG_SEED"
"""Variable with `config.seed`, for requests that bring none; on cpu."""


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


def _cpu(config: SglangConfig, placement: Placement) -> dict[str, str]:
    """Reasons are in `cpu_plugin`, which sets what can be set later."""
    return {
        CPU_PLUGIN: str(placement.tp_size),
        ENGINE_SEED: str(config.seed),
        "OMP_NUM_THREADS": str(threads(config, placement.tp_size)),
        "TORCHDYNAMO_DISABLE": "1",
    }
