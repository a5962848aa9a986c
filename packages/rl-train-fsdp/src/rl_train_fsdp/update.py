"""One iteration of the update: epochs, mini-batches, micro-batches, optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import torch

from rl_core.errors import NonFiniteError
from rl_core.trajectory import LogProbs
from rl_train_fsdp.losses import METRICS, LossInputs, policy_loss
from rl_train_fsdp.micro_batches import MicroBatch
from rl_train_fsdp.mini_batches import (
    loss_sizes,
    optimizer_steps,
    split_evenly,
    token_weight,
)
from rl_train_fsdp.schedules import learning_rate
from rl_train_fsdp.scoring import padded_plan, score, scores_by_sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.trajectory import TrainSample
    from rl_train_fsdp.config import FsdpConfig
    from rl_train_fsdp.micro_batches import Batching
    from rl_train_fsdp.optimizer import ShardedAdamW
    from rl_train_fsdp.policy import Policy, TokenScores
    from rl_train_fsdp.process_group import ProcessGroup
    from rl_train_fsdp.rows import Row


@dataclass
class _Progress:
    """What the optimizer steps of one iteration leave.

    Attributes:
        sums: of `METRICS`.
        grad_norms: one a step.
        scores: by the policy before the only step, by the position of the sample; None where there
            are several.
    """

    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(len(METRICS)))
    grad_norms: list[float] = field(default_factory=list)
    scores: dict[int, LogProbs] | None = None


@dataclass
class PolicyUpdate:
    """Runs iterations on one rank; all ranks run them together.

    Attributes:
        policy: sharded model.
        optimizer: of its parameters.
        group: the actor ranks.
        config: of the engine.
        device: this rank's.
        batching: what goes into one forward pass.
        accumulate: keep full gradients over the micro-batches of a step and reduce them once,
            instead of reducing after each.
        iteration: updates done so far: the step of the learning-rate schedule.
        scores: of the last iteration's samples by the policy before it, loss tokens only; None
            if it took several optimizer steps.
    """

    policy: Policy
    optimizer: ShardedAdamW
    group: ProcessGroup
    config: FsdpConfig
    device: torch.device
    batching: Batching
    accumulate: bool
    iteration: int = 0
    scores: list[LogProbs] | None = None

    def run(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """All epochs and mini-batches on this rank's samples; metrics over all ranks. Collective.

        NonFiniteError on every rank, before the weights change, if the gradient is not finite.
        """
        total = int(self.group.sum(torch.tensor([len(samples)]))[0])
        steps = optimizer_steps(total, self.config.loss.ppo_mini_batch_size)
        epochs = self.config.loss.ppo_epochs
        on_policy = steps * epochs == 1
        samples = self._with_old_log_probs(samples, on_policy=on_policy)
        lr = learning_rate(self.config.optimizer, self.iteration)
        progress = _Progress(scores={} if on_policy else None)
        self.scores = None
        minis = [[samples[index] for index in part] for part in split_evenly(len(samples), steps)]
        sizes = self.group.sum(torch.stack([loss_sizes(mini) for mini in minis]))
        for _ in range(epochs):
            for mini, size in zip(minis, sizes, strict=True):
                self._step(mini, size, lr, progress)
        self.iteration += 1
        if progress.scores is not None:
            none = LogProbs([], [])
            self.scores = [progress.scores.get(index, none) for index in range(len(samples))]
        return self._metrics(progress, lr)

    def _with_old_log_probs(
        self, samples: Sequence[TrainSample], *, on_policy: bool
    ) -> Sequence[TrainSample]:
        """Samples with the log-probs of the policy before the update, computed where needed.

        With a single optimizer step they are those of the step itself.
        """
        missing = any(sample.old_log_probs is None for sample in samples)
        missing = bool(self.group.max(torch.tensor([int(missing)]))[0])
        if on_policy or not missing:
            return samples
        scores = score(self.policy, self.group, samples, self.batching, self.device)
        return [
            msgspec.structs.replace(sample, old_log_probs=scored.log_probs)
            for sample, scored in zip(samples, scores, strict=True)
        ]

    def _step(
        self,
        samples: Sequence[TrainSample],
        sizes: torch.Tensor,
        lr: float,
        progress: _Progress,
    ) -> None:
        """One optimizer step; skipped where no rank has a token to learn from."""
        if sizes[0] == 0:
            return
        self.optimizer.zero_grad()
        learned = [index for index, sample in enumerate(samples) if any(sample.loss_mask)]
        samples = [samples[index] for index in learned]
        plan = padded_plan(self.batching.plan(samples, loss_only=True), self.group)
        for number, rows in enumerate(plan):
            self._synchronise(last=number == len(plan) - 1)
            batch, scores = self._accumulate(samples, rows, sizes, progress.sums)
            if progress.scores is not None:
                of_sample = scores_by_sample(scores, batch).items()
                progress.scores |= {learned[index]: scored for index, scored in of_sample}
        norm = self.optimizer.clip()
        if not math.isfinite(norm):
            msg = (
                f"update {self.iteration}: the gradient norm is {norm}; weights were left as they "
                "are. Look for NaN in the samples, or lower the learning rate"
            )
            raise NonFiniteError(msg)
        self.optimizer.step(lr)
        progress.grad_norms.append(norm)

    def _synchronise(self, *, last: bool) -> None:
        """Reduce the gradients of the coming backward pass, and free parameters after it?"""
        if self.accumulate:
            self.policy.set_requires_gradient_sync(last)
            self.policy.set_reshard_after_backward(last)

    def _accumulate(
        self,
        samples: Sequence[TrainSample],
        rows: Sequence[Row],
        sizes: torch.Tensor,
        sums: torch.Tensor,
    ) -> tuple[MicroBatch, TokenScores]:
        """Add one micro-batch's gradient, and its metrics to `sums`; what was scored, and how."""
        batch = MicroBatch.empty()
        if rows:
            batch = MicroBatch.pack(samples, rows, loss_only=True)
        chosen = [samples[index] for index in batch.indices]
        weights = [token_weight(self.config.loss, count, sizes) for count in batch.counts]
        scores = self.policy(batch.to(self.device))
        inputs = LossInputs.collect(chosen, weights, self.device)
        loss, metrics = policy_loss(scores, inputs, self.config.loss)
        # FSDP averages over the ranks; the weights already divide by what all ranks have.
        (loss * self.group.place.world_size).backward()
        sums += metrics.cpu()
        return batch, scores

    def _metrics(self, progress: _Progress, lr: float) -> dict[str, float]:
        sums = self.group.sum(progress.sums.double())
        steps = len(progress.grad_norms)
        values = dict(zip(METRICS, sums.tolist(), strict=True))
        tokens = values.pop("tokens")
        loss = values.pop("loss") / max(1, steps)
        if not self.config.loss.critic:
            values.pop("value_loss")
        return {
            "loss": loss,
            **{name: value / max(1.0, tokens) for name, value in values.items()},
            "grad_norm": sum(progress.grad_norms) / max(1, steps),
            "lr": lr,
            "optimizer_steps": float(steps),
        }
