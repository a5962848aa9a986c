"""Whether a model can compute a prompt once for several responses (`rows`)."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING

import torch

from rl_core.trajectory import TrainSample
from rl_train_fsdp.micro_batches import Batching, MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_train_fsdp.policy import Policy
    from rl_train_fsdp.process_group import ProcessGroup

_PROMPT = 4
_RESPONSES = 3
_LENGTH = 8
"""The probe: so many responses of so many tokens behind one prompt."""

_CLOSER = 8.0
"""How many times nearer to the plain computation the right row must be than the wrong ones."""


def obstacle(model: PreTrainedModel) -> str | None:
    """Why rows of several samples would be wrong or are not possible; None if they are right.

    The row's mask replaces the model's own, so every layer must attend to all earlier tokens; only
    transformers' `sdpa` attention takes such a mask.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if getattr(model, "_is_stateful", False):
        return "it carries a state along the sequence"
    if kinds and set(kinds) != {"full_attention"}:
        return f"it has layers of kind {', '.join(sorted(set(kinds) - {'full_attention'}))}"
    if not kinds and getattr(config, "sliding_window", None):
        return f"its attention slides over {config.sliding_window} tokens"
    if model.config._attn_implementation != "sdpa":
        return f"its attention is {model.config._attn_implementation!r}, not 'sdpa'"
    return None


def sharing_width(
    policy: Policy, group: ProcessGroup, device: torch.device
) -> tuple[int | None, str]:
    """Hidden size for `Batching.width`, or None; and what to tell the user. Collective.

    The model's word is not enough: both ways are computed and compared, on all ranks.
    """
    kind = type(policy.model).__name__
    reason = obstacle(policy.model)
    if reason is None:
        reason = _disagreement(policy, device)
        # Local trouble on one rank, if there is such a thing, must not split the group.
        if bool(group.max(torch.tensor([int(reason is not None)]))[0]):
            reason = reason or "another rank cannot"
    if reason is not None:
        return None, f"Prompts are not shared in training: {kind}: {reason}"
    width: int = policy.model.config.get_text_config().hidden_size
    return width, "Prompts are shared in training: common tokens of a group are computed once"


def _disagreement(policy: Policy, device: torch.device) -> str | None:
    """Why shared rows are wrong for this model, found by computing them; None if they are right.

    Rounding depends on dtype and model, so the yardstick is the model's own: the right row must
    be much nearer to the samples computed apart than a wrong one, in which responses see each
    other; and than one whose positions count on along the row, unless the model is known to take
    positions (an untrained one hardly heeds them, so that nothing could be seen).
    """
    samples = _probe(policy.model.get_input_embeddings().weight.shape[0])
    shared = _packed(samples, _PROMPT * 1024)

    def log_probs(batch: MicroBatch) -> torch.Tensor:
        return _log_probs(policy, device, len(samples), batch)

    apart = log_probs(_packed(samples, None))
    try:
        right = _distance(apart, log_probs(shared))
    except (TypeError, ValueError, RuntimeError) as error:
        return f"it cannot take a mask of that shape ({type(error).__name__})"
    length = shared.input_ids.shape[1]
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    wrong = [_distance(apart, log_probs(dataclasses.replace(shared, mask=causal)))]
    if "position_ids" not in inspect.signature(policy.model.base_model.forward).parameters:
        along = torch.arange(length)[None]
        wrong += [_distance(apart, log_probs(dataclasses.replace(shared, position_ids=along)))]
    if right * _CLOSER > min(wrong):
        return f"log-probabilities differ by {right:.2g} when prompts are shared"
    return None


def _probe(vocabulary: int) -> list[TrainSample]:
    tokens = iter(token % vocabulary for token in range(1, 10_000, 7))
    prompt = [next(tokens) for _ in range(_PROMPT)]
    return [
        TrainSample(prompt, [next(tokens) for _ in range(_LENGTH)], [1] * _LENGTH)
        for _ in range(_RESPONSES)
    ]


def _packed(samples: list[TrainSample], width: int | None) -> MicroBatch:
    (rows,) = Batching(1024, width).plan(samples, loss_only=False)
    return MicroBatch.pack(samples, rows, loss_only=False)


def _log_probs(policy: Policy, device: torch.device, count: int, batch: MicroBatch) -> torch.Tensor:
    """Of all response tokens, in the order of the samples."""
    with torch.no_grad():
        parts = policy(batch.to(device))[0].split(batch.counts)
    return torch.cat([parts[batch.indices.index(index)] for index in range(count)])


def _distance(some: torch.Tensor, others: torch.Tensor) -> float:
    return float((some - others).abs().max())
