"""The settings of a vLLM replica: the `rollout` section of the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rl_core.rollout.config import EngineConfig
from rl_rollout_vllm.installed_engine import ENGINE


@dataclass(frozen=True)
class VllmConfig(EngineConfig):
    """How a replica's vLLM is started and fed. `bracketed` is its weight-transfer API.

    Errors: ConfigError from the constructor, naming the key.
    """

    distribution: ClassVar[str] = "rl-rollout-vllm"
    engine: ClassVar = ENGINE
    own_engine_args: ClassVar[Mapping[str, str]] = {
        "model": "local_path",
        "dtype": "dtype",
        "gpu_memory_utilization": "gpu_memory_utilization",
        "kv_cache_memory_bytes": "kv_cache_memory_gb",
        "tensor_parallel_size": "tensor_model_parallel_size",
        "max_model_len": "max_model_len",
        "load_format": "load_format",
        "seed": "seed",
        "enable_sleep_mode": "free_cache_engine",
        "worker_extension_cls": "",
        "weight_transfer_config": "",
        "logprobs_mode": "",
    }

    cpu_packed_weights: bool = False
    """Let vLLM's CPU build copy linear weights into a packed layout: up to a third faster in
    float32 on large layers, but the copies can be neither inspected nor freed."""
