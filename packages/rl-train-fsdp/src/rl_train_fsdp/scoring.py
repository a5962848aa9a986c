"""Log-probabilities of given samples under the current policy, without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.trajectory import LogProbs
from rl_train_fsdp.micro_batches import MicroBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.trajectory import TrainSample
    from rl_train_fsdp.micro_batches import Batching
    from rl_train_fsdp.policy import Policy
    from rl_train_fsdp.process_group import ProcessGroup
    from rl_train_fsdp.rows import Row


def padded_plan(plan: list[list[Row]], group: ProcessGroup) -> list[list[Row]]:
    """`plan` with empty batches up to the longest plan of any rank. Collective.

    Every forward pass gathers parameters from all ranks, so all must run equally many.
    """
    longest = int(group.max(torch.tensor([len(plan)]))[0])
    return plan + [[] for _ in range(longest - len(plan))]


def score(
    policy: Policy,
    group: ProcessGroup,
    samples: Sequence[TrainSample],
    batching: Batching,
    device: torch.device,
) -> list[LogProbs]:
    """Log-probabilities and entropies of each sample's response tokens. Collective."""
    plan = batching.plan(samples, loss_only=False)
    scores = [LogProbs([], []) for _ in samples]
    for rows in padded_plan(plan, group):
        batch = MicroBatch.empty()
        if rows:
            batch = MicroBatch.pack(samples, rows, loss_only=False)
        with torch.no_grad():
            log_probs, entropy = policy(batch.to(device))
        columns = zip(
            batch.indices,
            log_probs.cpu().split(batch.counts),
            entropy.cpu().split(batch.counts),
            strict=True,
        )
        for index, sample_log_probs, sample_entropy in columns:
            scores[index] = LogProbs(sample_log_probs.tolist(), sample_entropy.tolist())
    return scores
