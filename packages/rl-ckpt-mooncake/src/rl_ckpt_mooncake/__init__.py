"""Weights from a trainer to rollout ranks by peer-to-peer reads along a chain (Mooncake)."""

from rl_core.interfaces import CheckpointBackend

CHECKPOINT_BACKEND = CheckpointBackend(
    "mooncake",
    "rl_ckpt_mooncake.config:MooncakeConfig",
    "rl_ckpt_mooncake.engine:MooncakeCheckpointEngine",
)
"""What the entry point announces; torch and Mooncake are imported with the engine only."""
