"""Between our requests and completions and SGLang's, without importing SGLang."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from rl_core.errors import RolloutError
from rl_core.trajectory import (
    Completion,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    VersionSpan,
)
from rl_core.versions import PolicyVersion

FINISH_REASONS = ("stop", "length", "abort")


def truncated(sampling: SamplingParams) -> bool:
    """Whether only a part of the vocabulary can be sampled."""
    return sampling.temperature > 0 and (sampling.top_p < 1.0 or sampling.top_k > 0)


def request_arguments(request: GenerateRequest, vocab_size: int) -> dict[str, Any]:
    """Keyword arguments of SGLang's `GenerateReqInput` for one completion."""
    sampling = request.sampling
    # Masks are given only to requests that say how many tokens they may choose from.
    top_k = vocab_size if truncated(sampling) and sampling.top_k <= 0 else sampling.top_k
    return {
        "rid": request.request_id,
        "input_ids": list(request.prompt_ids),
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": top_k,
            "max_new_tokens": sampling.max_tokens,
            "sampling_seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
        },
        "return_logprob": True,
        # SGLang's plain log-probabilities know of the temperature, not of top-p and top-k.
        "return_sampling_mask": truncated(sampling),
    }


def completion_of(
    request: GenerateRequest, output: Mapping[str, Any], committed: PolicyVersion | None
) -> Completion:
    """Our record of one finished SGLang output.

    Args:
        request: what was asked.
        output: what SGLang produced.
        committed: version being served when the request was admitted; it stands for all tokens
            where an older engine records no spans.
    """
    meta = output["meta_info"]
    tokens = [int(token) for token in output.get("output_ids") or ()]
    reason = (meta.get("finish_reason") or {}).get("type")
    if reason not in FINISH_REASONS:
        raise RolloutError(f"request {request.request_id} ended with {meta.get('finish_reason')}")
    return Completion(
        request.request_id,
        tokens,
        _log_probs(request, meta, len(tokens)),
        cast("FinishReason", reason),
        _spans(len(tokens), meta.get("weight_versions"), committed),
    )


def _log_probs(request: GenerateRequest, meta: Mapping[str, Any], count: int) -> list[float]:
    if truncated(request.sampling):
        values = [float(value) for value in meta.get("output_token_sampling_logprobs") or ()]
    else:
        values = [float(entry[0]) for entry in meta.get("output_token_logprobs") or ()]
    if len(values) < count:
        msg = f"request {request.request_id}: {count} tokens, {len(values)} log-probabilities"
        raise RolloutError(msg)
    return values[:count]


def _spans(
    length: int, spans: Sequence[Mapping[str, Any]] | None, committed: PolicyVersion | None
) -> list[VersionSpan]:
    if length == 0:
        return []
    if spans:
        return [
            VersionSpan(PolicyVersion.parse(span["version"]), span["start"], span["end"])
            for span in spans
            if span["end"] > span["start"]
        ]
    if committed is None:
        raise RolloutError("the engine gave tokens without a version")
    return [VersionSpan(committed, 0, length)]
