"""The model as the update sees it: padded token ids in, log-probabilities of responses out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rl_core.errors import ConfigError
from rl_train_fsdp.token_log_probs import Head, token_log_probs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_train_fsdp.micro_batches import MicroBatch


class Policy(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A causal language model whose forward runs the head on response positions only.

    It is the root of FSDP2, so that the head matrix is gathered while its forward runs.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head = Head.of(model.config.get_text_config())
        if model.get_output_embeddings() is None:
            raise ConfigError(f"{type(model).__name__} has no output embedding to train")

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, each (N,) float32, of the batch's N response tokens.

        Padding is on the right, so that the causal mask alone keeps it out of sight.
        """
        hidden = self.decoder(input_ids=batch.input_ids, use_cache=False)[0]
        hidden = hidden.flatten(0, 1).index_select(0, batch.positions)
        matrix: Any = self.model.get_output_embeddings()
        weight, bias = matrix.weight, getattr(matrix, "bias", None)
        return token_log_probs(hidden, weight, batch.targets, batch.temperature, self.head, bias)

    @property
    def decoder(self) -> nn.Module:
        """The model without its head."""
        decoder: nn.Module = self.model.base_model
        return decoder
