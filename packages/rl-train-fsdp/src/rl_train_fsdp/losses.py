"""The objective: PPO's clipped surrogate and its variants, k3 to a reference, an entropy bonus.

GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, eq. 3) is PPO's clipped surrogate (Schulman
et al. 2017, arXiv:1707.06347, eq. 7) with group-relative advantages, which come with the samples,
and a KL term in the loss (eq. 4), estimated by k3 (Schulman 2020, "Approximating KL divergence").
With r = exp(log p - log p_old) and d = log p_ref - log p, a token costs

    w max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)) + kl_coef (exp(d) - d - 1) - entropy_coef H

and the loss is the sum of tokens times their weights (`mini_batches.token_weight`). Variants:

- DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.1, "Clip-Higher": eps_high above eps_low;
  section 3.3, token-level loss: `loss_agg_mode` `token-mean`.
- Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), section 3.2: responses are summed and divided by a
  constant instead of their own length, `loss_agg_mode` `seq-mean-token-sum-norm`.
- GSPO (Zheng et al. 2025, arXiv:2507.18071), section 4.1: r is that of the sequence, the
  geometric mean of its tokens' ratios (`sequence_log_ratio`), `loss_mode` `gspo`.
- PPO with a critic adds vf_coef times the clipped value loss (`value_loss`); its advantages, by
  GAE, come with the samples.
- w corrects for samples of a rollout engine whose probabilities are not exactly the trainer's
  (truncated importance sampling); it comes with the samples and is 1 without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_train_fsdp.rows import response_offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.trajectory import TrainSample
    from rl_train_fsdp.config import LossConfig
    from rl_train_fsdp.policy import TokenScores

METRICS = ("loss", "kl", "entropy", "clip_fraction", "ppo_kl", "value_loss", "tokens")
"""What `policy_loss` sums; all but `loss` and `tokens` are per-token values to be averaged."""

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossInputs:
    """Columns of the N loss tokens of a micro-batch, float32, in its order.

    Attributes:
        weights: of each token in the loss; 1 / tokens for a plain mean.
        advantages: positive values raise the token's probability.
        old_log_probs: of the policy that sampled, or None to take the current one (on-policy).
        ref_log_probs: of the frozen reference, or None.
        rollout_is_weights: factors of the surrogate, or None for 1.
        old_values: by the critic before the update, or None without one.
        returns: targets of the critic, or None without one.
        counts: (S,) int64, how many of the N tokens, one after the other, are of each sequence.
    """

    weights: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    rollout_is_weights: Tensor | None
    counts: Tensor
    old_values: Tensor | None = None
    returns: Tensor | None = None

    @classmethod
    def collect(
        cls, samples: Sequence[TrainSample], weights: Sequence[float], device: torch.device
    ) -> LossInputs:
        """Columns of samples with one token weight each, in the order of `MicroBatch.pack`."""
        chosen = [response_offsets(sample, loss_only=True) for sample in samples]

        def column(name: str) -> Tensor | None:
            values: list[float] = []
            for sample, offsets in zip(samples, chosen, strict=True):
                source = getattr(sample, name)
                if source is None:
                    return None
                values.extend(source[offset] for offset in offsets)
            return torch.tensor(values, dtype=torch.float32, device=device)

        flat = [weight for weight, offsets in zip(weights, chosen, strict=True) for _ in offsets]
        advantages = column("advantages")
        if advantages is None:
            raise TypeError("samples without advantages")
        return cls(
            torch.tensor(flat, dtype=torch.float32, device=device),
            advantages,
            column("old_log_probs"),
            column("ref_log_probs"),
            column("rollout_is_weights"),
            torch.tensor([len(offsets) for offsets in chosen], dtype=torch.int64, device=device),
            column("old_values"),
            column("returns"),
        )


def policy_loss(
    scores: TokenScores, inputs: LossInputs, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """The weighted loss of N tokens, and its metrics.

    Args:
        scores: of the tokens by the current policy, and its critic if there is one.
        inputs: the tokens' other columns.
        config: coefficients.

    Returns:
        The differentiable loss, and the sums of `METRICS` over the tokens, (7,) float32, detached.
    """
    log_probs, entropy, values = scores
    old = log_probs.detach() if inputs.old_log_probs is None else inputs.old_log_probs
    log_ratio = log_probs - old
    ratio = log_ratio
    if config.loss_mode == "gspo":
        ratio = sequence_log_ratio(log_ratio, inputs.counts)
    surrogate, clipped = clipped_surrogate(ratio, inputs.advantages, *config.clip_bounds)
    if inputs.rollout_is_weights is not None:
        surrogate = surrogate * inputs.rollout_is_weights
    kl = torch.zeros_like(log_probs)
    if inputs.ref_log_probs is not None:
        kl = kl_k3(log_probs, inputs.ref_log_probs)
    tokens = surrogate + config.kl_coef * kl
    if config.entropy_coef:
        tokens = tokens - config.entropy_coef * entropy
    errors = torch.zeros_like(log_probs)
    if values is not None:
        errors = value_loss(values, inputs, config.cliprange_value)
        tokens = tokens + config.vf_coef * errors
    loss = (inputs.weights * tokens).sum()
    columns = [kl, entropy, clipped, -log_ratio, errors, torch.ones_like(kl)]
    per_token = torch.stack(columns).detach()
    return loss, torch.cat([loss.detach()[None], per_token.sum(1)])


def sequence_log_ratio(log_ratio: Tensor, counts: Tensor) -> Tensor:
    """GSPO's log-ratio: for each of N tokens the mean over its sequence, (N,); differentiable.

    Args:
        log_ratio: (N,) of the tokens, sequence after sequence.
        counts: (S,) int64 tokens of each sequence, N in all; 0 is allowed.
    """
    order = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    sums = log_ratio.new_zeros(len(counts)).index_add(0, order, log_ratio)
    return (sums / counts.clamp(min=1))[order]


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, lowest: float, highest: float
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate as a loss, and 1.0 where the clip decided it. Shapes (N,).

    The ratio counts within [`lowest`, `highest`], 1 - eps_low and 1 + eps_high.
    The log-ratio is held within 20 of 0, so that a token of vanished probability cannot make the
    product infinite.
    """
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(lowest, highest)
    return torch.maximum(plain, bounded), (bounded > plain).to(torch.float32)


def value_loss(values: Tensor, inputs: LossInputs, clip: float) -> Tensor:
    """PPO's clipped value loss of N tokens, (N,); differentiable.

    Half the squared error (Schulman et al. 2017, arXiv:1707.06347, eq. 9, L^VF), the larger one of
    the value and of the value held within `clip` of what it was: the pessimistic clipping of
    OpenAI's baselines, described by Engstrom et al. 2020 (arXiv:2005.12729), section 3.

    Errors: TypeError for samples without old values and returns.
    """
    if inputs.old_values is None or inputs.returns is None:
        raise TypeError("samples without old_values and returns")
    held = inputs.old_values + (values - inputs.old_values).clamp(-clip, clip)
    errors = torch.maximum((values - inputs.returns) ** 2, (held - inputs.returns) ** 2)
    return errors / 2


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Schulman's k3: unbiased, never negative estimate of KL(policy, reference), per token."""
    difference = ref_log_probs - log_probs
    return difference.exp() - difference - 1
