"""Log-probability and entropy of given tokens, without the full logits.

For hidden states h, head matrix W and temperature T: z = f(h W' + b) / T, log p(y) = z_y - lse(z),
entropy H = lse(z) - sum_j p_j z_j. The backward pass, worked out by hand,

    d log p(y) / dz_j = [j = y] - p_j          dH / dz_j = -p_j (log p_j + H)

recomputes z chunk by chunk instead of keeping it, so that at no time more than one chunk of logits
exists, and one more array of its size beside it (two with a soft cap). The matrix products run in
the dtype of h and W; everything after them in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_BYTES = 64 * 1024 * 1024
"""Upper bound of the float32 logits that exist at a time."""


@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits besides the matrix.

    Attributes:
        scale: factor of the logits (Cohere's `logit_scale`, 1 / Granite's `logits_scaling`).
        softcap: c in c * tanh(logits / c) (Gemma 2), or None.
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> Head:
        """The head that a transformers configuration describes."""
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(scale, None if softcap is None else float(softcap))


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    head: Head | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies (nats) of N tokens; differentiable in both.

    Args:
        hidden: (N, D) final hidden states at the positions that predict the tokens.
        weight: (V, D) head matrix, of the dtype of `hidden`.
        targets: (N,) int64 token ids.
        temperature: (N,) float32, greater than 0.
        head: scaling and soft cap of the logits.
        bias: (V,) or None.

    Returns:
        Two float32 tensors of shape (N,).
    """
    settings = (head or Head(), max(1, CHUNK_BYTES // (4 * weight.shape[0])))
    result: tuple[Tensor, Tensor] = _TokenLogProbs.apply(
        hidden, weight, bias, targets, temperature, settings
    )
    return result


class _TokenLogProbs(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
        targets, temperature, (head, size) = rest
        log_probs = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        entropy, normaliser = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for part in _chunks(hidden.shape[0], size):
            logits = _logits(hidden[part], weight, bias, head).div_(temperature[part, None])
            normaliser[part] = torch.logsumexp(logits, -1)
            log_p = logits.sub_(normaliser[part, None])
            log_probs[part] = log_p.gather(-1, targets[part, None]).squeeze(-1)
            entropy[part] = -log_p.exp().mul_(log_p).sum(-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, normaliser, entropy)
        ctx.settings = (head, size)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        hidden, weight, bias, targets, temperature, normaliser, entropy = ctx.saved_tensors
        head, size = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for part in _chunks(hidden.shape[0], size):
            raw = _logits(hidden[part], weight, bias, head)
            # The soft cap alone needs them again; the rest is done in place.
            log_p = raw if head.softcap is None else raw.clone()
            log_p.div_(temperature[part, None]).sub_(normaliser[part, None])
            outer = [None if grad is None else grad[part, None] for grad in grads]
            grad = _grad_logits(log_p, targets[part, None], entropy[part, None], outer)
            grad = _through_head(grad.div_(temperature[part, None]), raw, head)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            grad_hidden[part] = grad @ weight
            _add_product(grad_weight, grad, hidden[part])
            del raw, log_p, grad  # before the next ones are made
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Add grad' hidden to a float32 total, without a copy where the dtypes allow it."""
    if grad.dtype is total.dtype:
        total.addmm_(grad.T, hidden)
    else:
        total += grad.T @ hidden


def _grad_logits(
    log_p: Tensor, targets: Tensor, entropy: Tensor, outer: list[Tensor | None]
) -> Tensor:
    """Gradient of z, given those of log p(y) and of H, each (n, 1) or None, one of them given.

    In the memory of `log_p`, beside which there is one more of its size if H has a gradient.
    """
    of_log_prob, of_entropy = outer
    if of_entropy is None:
        grad = log_p.exp_().mul_(of_log_prob)
    else:
        probs = log_p.exp()
        grad = log_p.add_(entropy).mul_(of_entropy)
        if of_log_prob is not None:
            grad.add_(of_log_prob)
        grad.mul_(probs)
    grad.neg_()
    return grad if of_log_prob is None else grad.scatter_add_(-1, targets, of_log_prob)


def _chunks(rows: int, size: int) -> Iterator[slice]:
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> Tensor:
    """Float32 logits before the temperature; fresh memory."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if head.scale != 1.0:
        logits = logits * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return logits


def _through_head(grad: Tensor, capped: Tensor, head: Head) -> Tensor:
    """Gradient of the bare product, from that of the capped and scaled logits."""
    if head.softcap is not None:
        grad = grad * (1.0 - (capped / head.softcap) ** 2)
    return grad * head.scale if head.scale != 1.0 else grad
