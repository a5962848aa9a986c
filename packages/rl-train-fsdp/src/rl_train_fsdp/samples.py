"""What a rank was given to score or learn from, checked before it enters a collective. Local."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.errors import TrainError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.trajectory import TrainSample
    from rl_train_fsdp.config import LossConfig


def check_sequences(samples: Sequence[TrainSample], vocab_size: int) -> None:
    """TrainError names the first sample whose tokens or temperature the model cannot take."""
    for index, sample in enumerate(samples):
        if not sample.prompt_ids:
            raise TrainError(f"sample {index} has no prompt tokens")
        if not sample.temperature > 0:
            msg = f"sample {index} has temperature {sample.temperature}, which must be above 0"
            raise TrainError(msg)
        tokens = sample.prompt_ids + sample.response_ids
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            msg = f"sample {index} has a token id outside of the model's vocabulary, {vocab_size}"
            raise TrainError(msg)


def check_columns(samples: Sequence[TrainSample], config: LossConfig) -> None:
    """TrainError names the first sample whose columns do not fit its response or the loss."""
    for index, sample in enumerate(samples):
        columns: dict[str, Sequence[float] | None] = {
            "loss_mask": sample.loss_mask,
            "advantages": sample.advantages,
            "old_log_probs": sample.old_log_probs,
            "ref_log_probs": sample.ref_log_probs,
            "rollout_is_weights": sample.rollout_is_weights,
            "old_values": sample.old_values,
            "returns": sample.returns,
        }
        length = len(sample.response_ids)
        for name, column in columns.items():
            if column is not None and len(column) != length:
                msg = f"sample {index} has {len(column)} {name} for {length} response tokens"
                raise TrainError(msg)
        if config.kl_coef > 0 and sample.ref_log_probs is None:
            msg = f"sample {index} has no ref_log_probs, which kl_coef {config.kl_coef} needs"
            raise TrainError(msg)
        if config.critic and (sample.old_values is None or sample.returns is None):
            raise TrainError(f"sample {index} has no old_values or no returns for the critic")
    for name in ("old_log_probs", "ref_log_probs", "rollout_is_weights"):
        if len({getattr(sample, name) is None for sample in samples}) > 1:
            raise TrainError(f"some samples have {name} and others do not")
