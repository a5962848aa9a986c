"""The learning rate of a step, in closed form."""

import math

from rl_train_fsdp.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate that update number `step` (from 0) trains with.

    Warm-up rises linearly and reaches `lr` at step `warmup_steps` - 1 (the first step already
    trains). After that the rate is constant, or falls to `lr * min_lr_ratio` at
    `total_training_steps`, linearly or along half a cosine (Loshchilov & Hutter 2017,
    arXiv:1608.03983, eq. 5, without restarts), and stays there.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    return config.lr * _decay(config, step)


def _decay(config: OptimizerConfig, step: int) -> float:
    """Share of the peak rate after warm-up."""
    total = config.total_training_steps
    if config.lr_scheduler_type == "constant" or total is None:
        return 1.0
    progress = 1.0
    if step < total:  # else a warm-up to the end or beyond it would be a division by nothing
        progress = (step - config.warmup_steps) / (total - config.warmup_steps)
    left = 1.0 - progress
    if config.lr_scheduler_type == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left
