"""Model weights from a trainer to rollout engines through Hugging Face checkpoints on disk.

Importing this package imports neither torch nor anything that opens a file.
"""

from rl_core.interfaces import CheckpointBackend

CHECKPOINT_BACKEND = CheckpointBackend(
    name="disk",
    config_cls="rl_ckpt_disk.config:DiskConfig",
    engine="rl_ckpt_disk.engine:DiskCheckpointEngine",
)

__all__ = ["CHECKPOINT_BACKEND"]
