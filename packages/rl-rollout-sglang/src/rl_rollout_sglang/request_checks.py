"""What is refused before SGLang's schedulers see it, since they die of it. Imports no SGLang.

Seen in 0.5.23: most of it ends an engine with one HTTP request, too many samples and patterns that
backtrack hold it up. Everything that goes to a scheduler is looked at, from wherever it came
(`checked_manager`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_core.errors import RolloutError

MAX_SAMPLES = 1024
"""Completions of one prompt in one request (`n`): SGLang makes a request of each at once."""

PROMPT = "input_ids (OpenAI: prompt)"
TOP_LOGPROBS = "top_logprobs_num (OpenAI: logprobs, top_logprobs)"

WHOLE_VOCABULARY = 1 << 30
"""What SGLang makes of a `top_k` of -1."""


class RefusedRequestError(RolloutError, ValueError):
    """A request that an engine would die of; names the field.

    HTTP clients get status 400, which is what SGLang makes of a ValueError.
    """


def check_samples(sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> None:
    """RefusedRequestError for a number of samples, before SGLang makes requests of them.

    Args:
        sampling: parameters as they came, for all prompts or for each.
    """
    for given in [sampling] if isinstance(sampling, Mapping) else sampling or ():
        count = given.get("n", 1)
        if not isinstance(count, int) or not 1 <= count <= MAX_SAMPLES:
            raise RefusedRequestError(f"n: {count!r} is not a number from 1 to {MAX_SAMPLES}")


def check_request(request: Any, vocab_size: int, *, seeded: bool) -> None:
    """RefusedRequestError for a request as SGLang sends it to its schedulers.

    Args:
        request: a `TokenizedGenerateReqInput`.
        vocab_size: of the model.
        seeded: whether all requests are sampled with seeds, as on cpu.
    """
    _check_tokens(PROMPT, request.input_ids, vocab_size)
    if not request.input_ids:
        raise RefusedRequestError(f"{PROMPT}: it has no tokens")
    _check_range(TOP_LOGPROBS, request.top_logprobs_num, 0, vocab_size)
    _check_range("logprob_start_len", request.logprob_start_len, -1, len(request.input_ids))
    if request.token_indices_to_pool is not None:
        msg = "token_indices_to_pool (scores at chosen tokens): wrong behind a cached prefix"
        raise RefusedRequestError(f"{msg}, where it ends the engine")
    _check_sampling(request.sampling_params, vocab_size)
    if seeded and request.sampling_params.min_p > 0:
        raise RefusedRequestError("min_p: SGLang does not sample it with seeds, as is done here")


def _check_sampling(sampling: Any, vocab_size: int) -> None:
    if sampling.top_k != WHOLE_VOCABULARY:
        _check_range("top_k", sampling.top_k, 1, vocab_size)
    _check_tokens("stop_token_ids", sampling.stop_token_ids, vocab_size)
    for token, bias in (sampling.logit_bias or {}).items():
        if not math.isfinite(bias):
            raise RefusedRequestError(f"logit_bias: {bias} for token {token} is not finite")
    if (getattr(sampling, "beam_width", None) or 1) > 1:
        raise RefusedRequestError("beam_width: a pause in the middle of beams ends the engine")
    if sampling.stop_regex_strs:
        raise RefusedRequestError("stop_regex: one that backtracks holds up all requests; use stop")


def _check_tokens(name: str, tokens: Any, vocab_size: int) -> None:
    ids = np.asarray(list(tokens) if isinstance(tokens, set) else tokens or [])
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.size:
        msg = f"{name}: {wrong[0]} is not one of the token ids below {vocab_size}"
        raise RefusedRequestError(msg)


def _check_range(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high:
        raise RefusedRequestError(f"{name}: {value!r} is not a number from {low} to {high}")
