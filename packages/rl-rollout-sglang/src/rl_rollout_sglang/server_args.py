"""From our configuration to SGLang's server arguments. Imports nothing of SGLang."""

from pathlib import Path
from typing import Any

from rl_core.errors import ConfigError
from rl_core.interfaces import Placement
from rl_core.rollout.kv_room import bytes_per_token
from rl_rollout_sglang.config import SglangConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

MAX_RUNNING_REQUESTS = 256
"""Requests in one batch on cpu. SGLang's default is so many that their tables, with a row of the
model's whole length for each, can take more memory than the KV cache."""


def server_args(config: SglangConfig, placement: Placement) -> dict[str, Any]:
    """Keyword arguments of SGLang's `ServerArgs`.

    `engine_kwargs` win over everything that `SglangConfig` lets them name.
    """
    args = _common(config)
    args |= _cpu(config) if placement.device == "cpu" else _accelerator(config, placement)
    return args | config.engine_kwargs


def kv_tokens(config: SglangConfig, nbytes: int) -> int:
    """Tokens whose keys and values fit into `nbytes` on each rank.

    Errors: ConfigError if `config.json` does not tell the sizes.
    """
    model, ranks = config.text_model(), config.tensor_model_parallel_size
    try:
        each = bytes_per_token(model, config.dtype, ranks)
    except KeyError as error:
        msg = f"rollout.kv_cache_memory_gb: config.json of {config.local_path} has no {error}"
        raise ConfigError(msg) from error
    return nbytes // each


def _common(config: SglangConfig) -> dict[str, Any]:
    path = Path(config.local_path)
    return {
        "model_path": str(path),
        "dtype": config.dtype,
        "random_seed": config.seed,
        "tp_size": config.tensor_model_parallel_size,
        "context_length": config.max_model_len,
        "load_format": config.load_format,
        "skip_tokenizer_init": not any((path / name).exists() for name in TOKENIZER_FILES),
        "log_level": config.log_level.lower(),
        # Without it every idle rank keeps a core busy.
        "sleep_on_idle": True,
        # A warm-up request would run on dummy weights.
        "skip_server_warmup": True,
        # How many tokens a request with top-p or top-k may choose from, for its log-probabilities.
        "sampling_mask_max_tokens": config.text_model().get("vocab_size", 1),
    }


def _cpu(config: SglangConfig) -> dict[str, Any]:
    return {
        "device": "cpu",
        # The kernels for cpu are in a package that is not on PyPI; torch's own are.
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "disable_custom_all_reduce": True,
        # A share of all memory of the machine; the number of tokens is what limits.
        "mem_fraction_static": 0.95,
        "max_total_tokens": kv_tokens(config, config.kv_cache_bytes("cpu") or 0),
        "max_running_requests": MAX_RUNNING_REQUESTS,
    }


def _accelerator(config: SglangConfig, placement: Placement) -> dict[str, Any]:
    args: dict[str, Any] = {
        "device": placement.device,
        "mem_fraction_static": config.gpu_memory_utilization,
        "enable_memory_saver": config.free_cache_engine,
    }
    nbytes = config.kv_cache_bytes(placement.device)
    return args if nbytes is None else args | {"max_total_tokens": kv_tokens(config, nbytes)}
