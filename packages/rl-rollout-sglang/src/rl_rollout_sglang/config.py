"""The settings of an SGLang replica: the `rollout` section of the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rl_core.rollout.config import EngineConfig
from rl_rollout_sglang.installed_engine import ENGINE


@dataclass(frozen=True)
class SglangConfig(EngineConfig):
    """How a replica's SGLang is started and fed. `bracketed` is its weight-update session.

    Errors: ConfigError from the constructor, naming the key.
    """

    distribution: ClassVar[str] = "rl-rollout-sglang"
    engine: ClassVar = ENGINE
    own_engine_args: ClassVar[Mapping[str, str]] = {
        "model_path": "local_path",
        "dtype": "dtype",
        "mem_fraction_static": "gpu_memory_utilization",
        "max_total_tokens": "kv_cache_memory_gb",
        "tp_size": "tensor_model_parallel_size",
        "context_length": "max_model_len",
        "load_format": "load_format",
        "random_seed": "seed",
        "enable_memory_saver": "free_cache_engine",
        "log_level": "log_level",
        "device": "",
        "skip_tokenizer_init": "",
        "custom_sigquit_handler": "",
        "tokenizer_worker_num": "",
        "host": "",
        "port": "",
    }
