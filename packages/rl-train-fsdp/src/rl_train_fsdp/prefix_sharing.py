"""Whether a model can compute a prompt once for several responses (`rows`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.trajectory import TrainSample
from rl_train_fsdp.micro_batches import Batching, MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_train_fsdp.policy import Policy

_PROBE = [
    TrainSample([1, 2, 3], [4, 5, 6], [1, 1, 1]),
    TrainSample([1, 2, 3], [6, 4], [1, 1]),
]


def obstacle(model: PreTrainedModel) -> str | None:
    """Why rows of several samples would be wrong or are not possible; None if they are right.

    The row's mask replaces the model's own, so every layer must attend to all earlier tokens; only
    transformers' `sdpa` attention takes such a mask.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if model.config._attn_implementation != "sdpa":
        return f"its attention is {model.config._attn_implementation!r}, not 'sdpa'"
    if getattr(model, "_is_stateful", False):
        return "it carries a state along the sequence"
    if kinds and set(kinds) != {"full_attention"}:
        return f"it has layers of kind {', '.join(sorted(set(kinds) - {'full_attention'}))}"
    if not kinds and getattr(config, "sliding_window", None):
        return f"its attention slides over {config.sliding_window} tokens"
    return None


def sharing_width(policy: Policy, device: torch.device) -> tuple[int | None, str]:
    """Hidden size for `Batching.width`, or None; and what to tell the user. Collective.

    The model's word is not enough: both ways are computed and compared.
    """
    kind = type(policy.model).__name__
    reason = obstacle(policy.model)
    if reason is None and not _agree(policy, device):
        reason = "its log-probabilities differ when prompts are shared"
    if reason is not None:
        return None, f"Prompts are not shared in training: {kind}: {reason}"
    width: int = policy.model.config.get_text_config().hidden_size
    return width, "Prompts are shared in training: common tokens of a group are computed once"


def _agree(policy: Policy, device: torch.device) -> bool:
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    samples = [
        TrainSample(
            [token % vocabulary for token in sample.prompt_ids],
            [token % vocabulary for token in sample.response_ids],
            sample.loss_mask,
        )
        for sample in _PROBE
    ]
    apart, together = (_scores(policy, device, samples, width) for width in (None, 1024))
    return policy.close(together, apart)


def _scores(
    policy: Policy, device: torch.device, samples: list[TrainSample], width: int | None
) -> torch.Tensor:
    """Log-probabilities of all response tokens, in the order of the samples."""
    (rows,) = Batching(1024, width).plan(samples, loss_only=False)
    batch = MicroBatch.pack(samples, rows, loss_only=False)
    with torch.no_grad():
        log_probs = policy(batch.to(device))[0].split(batch.counts)
    return torch.cat([log_probs[batch.indices.index(index)] for index in range(len(samples))])
