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
    from rl_train_fsdp.policy import Policy, TokenScores
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
    """What `LogProbs` says of each sample's response tokens. Collective."""
    plan = batching.plan(samples, loss_only=False)
    scores = [LogProbs([], []) for _ in samples]
    for rows in padded_plan(plan, group):
        batch = MicroBatch.empty()
        if rows:
            batch = MicroBatch.pack(samples, rows, loss_only=False)
        with torch.no_grad():
            scored = policy(batch.to(device))
        for index, found in scores_by_sample(scored, batch).items():
            scores[index] = found
    return scores


def scores_by_sample(scored: TokenScores, batch: MicroBatch) -> dict[int, LogProbs]:
    """The tokens' scores on the host, by the index of their sample."""
    log_probs, entropy = _split(scored.log_probs, batch), _split(scored.entropy, batch)
    values: list[list[float]] | list[None] = [None] * len(batch.counts)
    if scored.values is not None:
        values = _split(scored.values, batch)
    columns = zip(log_probs, entropy, values, strict=True)
    return {index: LogProbs(*column) for index, column in zip(batch.indices, columns, strict=True)}


def _split(column: torch.Tensor, batch: MicroBatch) -> list[list[float]]:
    return [part.tolist() for part in column.detach().cpu().split(batch.counts)]
