"""The model as the update sees it: padded token ids in, log-probabilities of responses out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_core.errors import ConfigError
from rl_train_fsdp.micro_batches import MicroBatch
from rl_train_fsdp.optimizer import local
from rl_train_fsdp.token_log_probs import Head, token_log_probs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


class TokenScores(NamedTuple):
    """Of N response tokens, each (N,) float32.

    Attributes:
        log_probs: log-probabilities.
        entropy: entropies, nats.
        values: the critic's, of the states before the tokens; None without a critic.
    """

    log_probs: Tensor
    entropy: Tensor
    values: Tensor | None


class Policy(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A causal language model whose forward runs the head on response positions only.

    It is the root of FSDP2, so that the head matrix is gathered while its forward runs. With a
    critic it has a second, linear head: the value of the state before each token. It is no part of
    `model`, so that it is never published.
    """

    def __init__(self, model: PreTrainedModel, *, critic: bool = False) -> None:
        super().__init__()
        self.model = model
        self.value_head: nn.Linear | None = None
        if critic:
            width = model.config.get_text_config().hidden_size
            self.value_head = nn.Linear(width, 1, device="meta", dtype=torch.float32)
        self.head = Head.of(model.config.get_text_config())
        if model.get_output_embeddings() is None or model.base_model is model:
            kind = type(model).__name__
            raise ConfigError(f"{kind} has no decoder with an output embedding on top of it")

    def reset_critic(self) -> None:
        """Let every state be worth 0, as long as nothing is known. Local."""
        if self.value_head is not None:
            for parameter in self.value_head.parameters():
                nn.init.zeros_(local(parameter.detach()))

    def forward(self, batch: MicroBatch, *, full: bool = False) -> TokenScores:
        """Log-probabilities, entropies and values of the batch's N response tokens.

        Padding is on the right, so that causal order alone keeps it out of sight.

        Args:
            batch: what to score, on the device of the model.
            full: let the model compute all its logits instead (for comparison only).
        """
        if full:
            logits = self.model(**_inputs(batch)).logits
            return TokenScores(*_from_logits(logits.flatten(0, 1)[batch.positions], batch), None)
        hidden = self.model.base_model(**_inputs(batch))[0]
        hidden = hidden.flatten(0, 1).index_select(0, batch.positions)
        matrix: Any = self.model.get_output_embeddings()
        bias = getattr(matrix, "bias", None)
        scores = token_log_probs(
            hidden, matrix.weight, batch.targets, batch.temperature, self.head, bias
        )
        # The sum over the one column is no view: FSDP hangs its hooks on what is returned.
        values = None if self.value_head is None else self.value_head(hidden).sum(-1).float()
        return TokenScores(*scores, values)

    def check_head(self, device: torch.device) -> None:
        """ConfigError if the model does more between hidden states and logits than `Head` knows.

        Compares both ways of `forward` on eight tokens. Collective.
        """
        ids = torch.arange(1, 9) % self.model.get_output_embeddings().weight.shape[0]
        positions = torch.arange(7)
        batch = MicroBatch((0,), (7,), ids[None], positions, ids[1:], torch.ones(7)).to(device)
        with torch.no_grad():
            ours, reference = self(batch)[0], self(batch, full=True)[0]
        if not self.close(ours, reference):
            msg = (
                f"{type(self.model).__name__} computes its logits in a way that is not supported: "
                f"log-probabilities differ by {float((ours - reference).abs().max()):.3g}"
            )
            raise ConfigError(msg)

    def close(self, some: Tensor, others: Tensor) -> bool:
        """Do two ways of computing log-probabilities agree within the dtype of the forward?

        Right after a forward pass, while the head matrix is still there in that dtype.
        """
        tolerance = _TOLERANCE[self.model.get_output_embeddings().weight.dtype]
        return bool(torch.allclose(some, others, rtol=tolerance, atol=tolerance))


def _inputs(batch: MicroBatch) -> dict[str, Any]:
    """Arguments of the model's forward."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.mask is not None:
        inputs |= {"attention_mask": batch.mask, "position_ids": batch.position_ids}
    return inputs


def _from_logits(logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits.float() / batch.temperature[:, None], -1)
    chosen = log_p.gather(-1, batch.targets[:, None]).squeeze(-1)
    return chosen, -(log_p.exp() * log_p).sum(-1)
