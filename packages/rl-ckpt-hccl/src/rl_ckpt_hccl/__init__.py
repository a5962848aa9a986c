"""Weights from a trainer to rollout ranks by collective broadcast: HCCL, NCCL or Gloo."""

from rl_core.interfaces import CheckpointBackend

CHECKPOINT_BACKEND = CheckpointBackend(
    "hccl", "rl_ckpt_hccl.config:HcclConfig", "rl_ckpt_hccl.engine:HcclCheckpointEngine"
)
"""What the entry point announces; torch is imported with the engine only."""
