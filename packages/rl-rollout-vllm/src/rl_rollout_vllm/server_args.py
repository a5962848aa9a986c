"""From our configuration to vLLM's engine arguments. Imports nothing of vLLM."""

import dataclasses
from pathlib import Path
from typing import Any

from rl_core.interfaces import Placement
from rl_rollout_vllm.config import VllmConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
TRANSFER_BACKEND = "rl_rollout"
"""Name of our engine in vLLM's registry of weight-transfer engines."""

COLLECTIVE_SEGMENTS = "vllm_dist_"
"""Names of the shared memory of vLLM's CPU collectives, which their creators never remove."""

QUEUE_SEGMENTS = "psm_"
"""Names of the shared memory of vLLM's message queues, which goes in an orderly end only."""


def engine_args(config: VllmConfig, placement: Placement) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`, except the weight-transfer configuration.

    `engine_kwargs` win over everything that `VllmConfig` lets them name.
    """
    args = _common(config)
    args |= _cpu(config) if placement.device == "cpu" else _accelerator(config)
    extra = dict(config.engine_kwargs)
    args["additional_config"] |= extra.pop("additional_config", {})
    return args | extra


def fields_of(args_cls: Any) -> list[str]:
    """Names of the arguments of vLLM's dataclass."""
    return [item.name for item in dataclasses.fields(args_cls)]


def _common(config: VllmConfig) -> dict[str, Any]:
    path = Path(config.local_path)
    return {
        "model": str(path),
        "dtype": config.dtype,
        "seed": config.seed,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "max_model_len": config.max_model_len,
        "load_format": config.load_format,
        "skip_tokenizer_init": not any((path / name).exists() for name in TOKENIZER_FILES),
        "worker_extension_cls": "rl_rollout_vllm.worker_extension.RolloutWorkerExtension",
        # The behaviour policy's log-probabilities: after temperature, top-p and top-k.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
        "additional_config": {"rl_rollout_vllm": {"packed": config.cpu_packed_weights}},
    }


def _cpu(config: VllmConfig) -> dict[str, Any]:
    return {
        "kv_cache_memory_bytes": config.kv_cache_bytes("cpu"),
        # Compiling takes longer than a laptop-sized run gains from it.
        "enforce_eager": True,
        # vLLM 0.32 takes back the random numbers of a partly prefilled request by moving its
        # generator's offset, which CPU generators lack: with a seed, the engine would die.
        "enable_chunked_prefill": False,
    }


def _accelerator(config: VllmConfig) -> dict[str, Any]:
    args: dict[str, Any] = {
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_sleep_mode": config.free_cache_engine,
    }
    kv_bytes = config.kv_cache_bytes("cuda")
    return args if kv_bytes is None else args | {"kv_cache_memory_bytes": kv_bytes}
