"""How the reference engine samples a token, and what its log-probability is."""

import torch

from rl_core.errors import RolloutError
from rl_core.trajectory import SamplingParams


def distribution(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probabilities that a token is sampled from, float32, (vocab,).

    Logits are divided by the temperature first, then cut by `top_k` and `top_p` and normalised
    again. Greedy sampling (temperature 0) reports those of temperature 1.
    """
    if sampling.temperature == 0:
        return torch.log_softmax(logits.float(), -1)
    scaled = torch.log_softmax(logits.float() / sampling.temperature, -1)
    values, order = scaled.sort(descending=True)
    keep = torch.ones_like(order, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[sampling.top_k :] = False
    before = values.exp().cumsum(-1) - values.exp()
    keep &= (before < sampling.top_p) | (torch.arange(len(order)) == 0)
    cut = torch.full_like(scaled, -torch.inf)
    cut[order[keep]] = scaled[order[keep]]
    return torch.log_softmax(cut, -1)


def sample(
    logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator
) -> tuple[int, float]:
    """A token and its log-probability; RolloutError if the logits are not finite."""
    if not logits.isfinite().all():
        raise RolloutError("the logits are not finite")
    log_probs = distribution(logits, sampling)
    if sampling.temperature == 0:
        token = int(log_probs.argmax())
    else:
        token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
    return token, float(log_probs[token])
