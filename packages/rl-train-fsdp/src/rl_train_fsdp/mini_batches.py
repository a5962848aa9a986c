"""One rank's share of each optimizer step, and the weight of every loss token in it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from rl_core.errors import TrainError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.trajectory import TrainSample
    from rl_train_fsdp.config import LossAggregation, LossConfig


def check_samples(samples: Sequence[TrainSample], config: LossConfig) -> None:
    """TrainError names the first sample that cannot be trained on. Local."""
    for index, sample in enumerate(samples):
        length = len(sample.response_ids)
        columns: dict[str, Sequence[float] | None] = {
            "loss_mask": sample.loss_mask,
            "advantages": sample.advantages,
            "old_log_probs": sample.old_log_probs,
            "ref_log_probs": sample.ref_log_probs,
        }
        for name, column in columns.items():
            if column is not None and len(column) != length:
                msg = f"sample {index}: {len(column)} {name} for {length} response tokens"
                raise TrainError(msg)
        if not sample.prompt_ids or sample.temperature <= 0:
            msg = f"sample {index} has no prompt, or a temperature that is not above 0"
            raise TrainError(msg)
        if config.kl_coef > 0 and sample.ref_log_probs is None:
            msg = f"sample {index} has no ref_log_probs, which kl_coef {config.kl_coef} needs"
            raise TrainError(msg)
    if len({sample.old_log_probs is None for sample in samples}) > 1:
        raise TrainError("old_log_probs are given for some samples and not for others")


def optimizer_steps(total_samples: int, mini_batch_size: int | None) -> int:
    """Optimizer steps of one epoch over `total_samples` samples of all ranks."""
    if mini_batch_size is None or total_samples == 0:
        return 1
    return -(-total_samples // mini_batch_size)


def split_evenly(count: int, parts: int) -> list[range]:
    """`count` consecutive indices in `parts` ranges whose sizes differ by at most one."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


def loss_sizes(samples: Sequence[TrainSample]) -> torch.Tensor:
    """(2,) float64: loss tokens, and sequences that have any. Summed over ranks by the caller."""
    tokens = [sum(sample.loss_mask) for sample in samples]
    return torch.tensor([sum(tokens), sum(count > 0 for count in tokens)], dtype=torch.float64)


def token_weight(mode: LossAggregation, own_tokens: int, sizes: torch.Tensor) -> float:
    """Weight of each loss token of a sequence, so that the loss is the weighted sum of tokens.

    Args:
        mode: `token-mean` gives 1 / tokens; `seq-mean-token-mean` 1 / (sequences * own tokens);
            `seq-mean-token-sum` 1 / sequences.
        own_tokens: loss tokens of this sequence.
        sizes: `loss_sizes` of the whole mini-batch, over all ranks, so that the gradient depends
            neither on the number of ranks nor on how samples are batched.
    """
    tokens, sequences = float(sizes[0]), float(sizes[1])
    if own_tokens == 0:
        return 0.0
    match mode:
        case "token-mean":
            return 1.0 / tokens
        case "seq-mean-token-mean":
            return 1.0 / (sequences * own_tokens)
        case "seq-mean-token-sum":
            return 1.0 / sequences
