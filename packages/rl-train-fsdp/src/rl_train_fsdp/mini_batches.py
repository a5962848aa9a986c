"""One rank's share of each optimizer step, and the weight of every loss token in it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.trajectory import TrainSample
    from rl_train_fsdp.config import LossConfig


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


def token_weight(config: LossConfig, own_tokens: int, sizes: torch.Tensor) -> float:
    """Weight of each loss token of a sequence, so that the loss is the weighted sum of tokens.

    Args:
        config: its `loss_agg_mode`: `token-mean` gives 1 / tokens; `seq-mean-token-mean`
            1 / (sequences * own tokens); `seq-mean-token-sum` 1 / sequences;
            `seq-mean-token-sum-norm` 1 / (sequences * `loss_scale_factor`).
        own_tokens: loss tokens of this sequence.
        sizes: `loss_sizes` of the whole mini-batch, over all ranks, so that the gradient depends
            neither on the number of ranks nor on how samples are batched.
    """
    tokens, sequences = float(sizes[0]), float(sizes[1])
    match config.loss_agg_mode:
        case "token-mean":
            return 1.0 / tokens
        case "seq-mean-token-mean":
            return 1.0 / (sequences * own_tokens)
        case "seq-mean-token-sum":
            return 1.0 / sequences
        case "seq-mean-token-sum-norm":
            return 1.0 / (sequences * (config.loss_scale_factor or 1.0))
