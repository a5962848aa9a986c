"""Will all processes of a node fit into its memory? Asked before any of them starts.

A lower bound: activations, which depend on the samples, are left out.
"""

from pathlib import Path

import psutil

from minirl.config import MiniRLConfig
from rl_core.errors import ConfigError

_GB = 1 << 30
_ENGINE_BASE = 1.7 * _GB
"""A vLLM server on cpu with its engine process, without weights and KV cache (measured: 3.8 GB
PSS for two actor ranks and one replica with 1 GiB of KV cache)."""
_ACTOR_BASE = 0.7 * _GB
"""An actor rank with torch and transformers imported."""
_DEFAULT_KV_GB = 0.25
_TRAIN_BYTES = 16
"""Bytes per parameter while training: float32 parameter, gradient and two Adam moments."""
_SAVED_BYTES = 12
"""Bytes per parameter while a checkpoint is written: a copy of all that but the gradient."""


def check_memory(model: Path, actor_world: int, rollout_world: int, config: MiniRLConfig) -> None:
    """ConfigError if the estimate for this node exceeds the memory that is available."""
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    parameters = weights / 2  # as if bfloat16: never too few
    kv_gb = config.rollout.kv_cache_memory_gb
    kv = (_DEFAULT_KV_GB if kv_gb is None else kv_gb) * _GB
    tp_size = config.rollout.tensor_model_parallel_size
    replicas = rollout_world // tp_size
    engines = replicas * (_ENGINE_BASE * (1 + 0.5 * (tp_size - 1)) + tp_size * kv + 2 * weights)
    bucket = config.checkpoint_engine.update_weights_bucket_megabytes * (1 << 20)
    buckets = rollout_world * 2 * min(bucket, 2 * weights)
    copies = actor_world / config.actor.engine_config.fsdp_size
    reference = 4 if config.algorithm.kl_coef > 0 else 0
    saved = _SAVED_BYTES if config.trainer.save_freq else 0
    bytes_each = _TRAIN_BYTES + reference + saved
    actors = actor_world * _ACTOR_BASE + copies * parameters * bytes_each
    need = engines + buckets + actors
    free = psutil.virtual_memory().available
    if need > free:
        msg = (
            f"not enough memory: {replicas} engines with rollout.kv_cache_memory_gb={kv_gb} "
            f"({engines / _GB:.1f} GB), buckets ({buckets / _GB:.1f} GB) and {actor_world} actor "
            f"ranks ({actors / _GB:.1f} GB) need {need / _GB:.1f} GB, {free / _GB:.1f} GB are "
            "free; lower kv_cache_memory_gb, the number of replicas, or the bucket size"
        )
        raise ConfigError(msg)
