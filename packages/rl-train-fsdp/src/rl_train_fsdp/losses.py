"""The objective: PPO's clipped surrogate, k3 to a reference, an entropy bonus.

GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, eq. 3) is PPO's clipped surrogate (Schulman
et al. 2017, arXiv:1707.06347, eq. 7) with group-relative advantages, which come with the samples,
and a KL term in the loss (eq. 4), estimated by k3 (Schulman 2020, "Approximating KL divergence").
With r = exp(log p - log p_old) and d = log p_ref - log p, a token costs

    max(-A r, -A clip(r, 1 - eps, 1 + eps)) + kl_coef (exp(d) - d - 1) - entropy_coef H

and the loss is the sum of tokens times their weights (`mini_batches.token_weight`).
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

METRICS = ("loss", "kl", "entropy", "clip_fraction", "ppo_kl", "tokens")
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
    """

    weights: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None

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
        )


def policy_loss(
    log_probs: Tensor, entropy: Tensor, inputs: LossInputs, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """The weighted loss of N tokens, and its metrics.

    Args:
        log_probs: (N,) float32 of the current policy.
        entropy: (N,) float32, nats.
        inputs: the tokens' other columns.
        config: coefficients.

    Returns:
        The differentiable loss, and the sums of `METRICS` over the tokens, (6,) float32, detached.
    """
    old = log_probs.detach() if inputs.old_log_probs is None else inputs.old_log_probs
    log_ratio = log_probs - old
    surrogate, clipped = clipped_surrogate(log_ratio, inputs.advantages, config.clip_ratio)
    kl = torch.zeros_like(log_probs)
    if inputs.ref_log_probs is not None:
        kl = kl_k3(log_probs, inputs.ref_log_probs)
    tokens = surrogate + config.kl_coef * kl
    if config.entropy_coef:
        tokens = tokens - config.entropy_coef * entropy
    loss = (inputs.weights * tokens).sum()
    per_token = torch.stack([kl, entropy, clipped, -log_ratio, torch.ones_like(kl)]).detach()
    return loss, torch.cat([loss.detach()[None], per_token.sum(1)])


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate as a loss, and 1.0 where the clip decided it. Shapes (N,).

    The log-ratio is held within 20 of 0, so that a token of vanished probability cannot make the
    product infinite.
    """
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - eps, 1 + eps)
    return torch.maximum(plain, bounded), (bounded > plain).to(torch.float32)


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Schulman's k3: unbiased, never negative estimate of KL(policy, reference), per token."""
    difference = ref_log_probs - log_probs
    return difference.exp() - difference - 1
