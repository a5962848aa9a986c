"""Between our requests and completions and vLLM's, without importing vLLM."""

from collections.abc import Sequence
from typing import Any, cast

from rl_core.errors import RolloutError
from rl_core.trajectory import Completion, FinishReason, GenerateRequest, VersionSpan
from rl_core.versions import PolicyVersion

FINISH_REASONS = ("stop", "length", "abort")


def sampling_arguments(request: GenerateRequest) -> dict[str, Any]:
    """Keyword arguments of vLLM's `SamplingParams` for one completion with log-probabilities."""
    sampling = request.sampling
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,  # of the sampled token only
        "detokenize": False,
    }


def completion_of(request_id: str, output: Any, committed: PolicyVersion | None) -> Completion:
    """Our record of one finished vLLM `CompletionOutput`.

    Args:
        request_id: of the request.
        output: what vLLM produced.
        committed: version being served when the request was admitted; it stands for all tokens
            where an older engine records no spans.
    """
    tokens = list(output.token_ids)
    if output.finish_reason not in FINISH_REASONS:
        raise RolloutError(f"request {request_id} ended with {output.finish_reason!r}")
    return Completion(
        request_id,
        tokens,
        _log_probs(tokens, output.logprobs),
        cast("FinishReason", output.finish_reason),
        _spans(len(tokens), getattr(output, "weight_versions", None), committed),
    )


def _log_probs(tokens: Sequence[int], entries: Any) -> list[float]:
    if not tokens:
        return []
    return [float(entry[token].logprob) for token, entry in zip(tokens, entries, strict=True)]


def _spans(length: int, spans: Any, committed: PolicyVersion | None) -> list[VersionSpan]:
    if length == 0:
        return []
    if spans:
        return [
            VersionSpan(PolicyVersion.parse(span.version), span.start, span.end) for span in spans
        ]
    if committed is None:
        raise RolloutError("the engine gave tokens without a version")
    return [VersionSpan(committed, 0, length)]
