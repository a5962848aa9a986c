"""Will all processes of a node fit into its memory? Asked before any of them starts.

A lower bound: activations, which depend on the samples, are left out.
"""

from minirl.config import MiniRLConfig
from minirl.machine_memory import available_memory
from rl_core.errors import ConfigError

_GB = 1 << 30
_ENGINE_BASE = 1.7 * _GB
"""A vLLM server on cpu with its engine process, without weights and KV cache (measured: 3.8 GB
PSS for two actor ranks and one replica with 1 GiB of KV cache)."""
_ACTOR_BASE = 0.7 * _GB
"""An actor rank with torch and transformers imported."""
_DEFAULT_KV_GB = 0.25
_TRAIN_BYTES = 16
"""Bytes per parameter while training: float32 parameter, gradient and two Adam moments, spread
over the ranks that share a copy."""
_UNSHARDED_BYTES = 8
"""Bytes per parameter that each rank on cpu holds in whole during an update: the gathered
parameters, and gradients that are kept in float32 until the last micro-batch (with bfloat16, also
those of the one before they are added up)."""
_SERVED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SAVED_BYTES = 12
"""Bytes per parameter while a checkpoint is written: a copy of all that but the gradient."""


def check_memory(
    parameters: int, actor_world: int, rollout_world: int, config: MiniRLConfig
) -> None:
    """ConfigError if the estimate for this node exceeds the memory that is available.

    Args:
        parameters: elements of the model's tensors.
        actor_world: number of actor ranks.
        rollout_world: number of rollout ranks.
        config: everything else.
    """
    # Not in the dtype they are stored in: actors hold float32, engines what they serve.
    weights = parameters * _SERVED_BYTES[config.rollout.dtype]
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
    shared = copies * (_TRAIN_BYTES + reference + saved) + actor_world * _UNSHARDED_BYTES
    actors = actor_world * _ACTOR_BASE + parameters * shared
    need = engines + buckets + actors
    free = available_memory()
    if need > free:
        msg = (
            f"not enough memory: {replicas} engines with rollout.kv_cache_memory_gb={kv_gb} "
            f"({engines / _GB:.1f} GB), buckets ({buckets / _GB:.1f} GB) and {actor_world} actor "
            f"ranks ({actors / _GB:.1f} GB) need {need / _GB:.1f} GB, {free / _GB:.1f} GB are "
            "free; lower kv_cache_memory_gb, the number of replicas, or the bucket size"
        )
        raise ConfigError(msg)
