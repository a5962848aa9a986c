"""What passes between generation, reward and training: requests, completions, train samples.

Token ids, behaviour log-probabilities, sampling parameters, seed and policy version are recorded
where they are produced and never overwritten.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from rl_core.errors import RolloutError
from rl_core.versions import PolicyVersion

FinishReason = Literal["stop", "length", "abort"]


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one completion is sampled.

    Attributes:
        temperature: 0 means greedy.
        top_p: nucleus mass in (0, 1].
        top_k: -1 means no limit.
        max_tokens: upper bound of the completion's length, in tokens.
        seed: per-request seed, or None for the engine's own randomness.
        ignore_eos: go on to `max_tokens` whatever is sampled (benchmarks).
        n: completions of the prompt, each sampled by itself.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    seed: int | None = None
    ignore_eos: bool = False
    n: int = 1


class GenerateRequest(msgspec.Struct, frozen=True):
    """One prompt to be completed, `sampling.n` times.

    Attributes:
        request_id: unique in the run.
        prompt_ids: prompt tokens, at least one.
        sampling: how to sample.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams

    def samples(self) -> list["GenerateRequest"]:
        """One request for each of its completions: itself where there is one.

        Of several, number k (from 0) is called `<request_id>#<k>`; with a seed s its seed is s + k,
        as vLLM and its HTTP interface have it, so that each can be sampled again alone.

        Errors: RolloutError unless n is positive.
        """
        sampling = self.sampling
        if sampling.n < 1:
            raise RolloutError(f"request {self.request_id}: n={sampling.n} completions")
        if sampling.n == 1:
            return [self]
        return [
            GenerateRequest(
                f"{self.request_id}#{number}",
                self.prompt_ids,
                replace(
                    sampling, n=1, seed=None if sampling.seed is None else sampling.seed + number
                ),
            )
            for number in range(sampling.n)
        ]


def samples_of(requests: Iterable[GenerateRequest]) -> list[GenerateRequest]:
    """One request for each completion that `requests` ask for, in order."""
    return [sample for request in requests for sample in request.samples()]


class VersionSpan(msgspec.Struct, frozen=True):
    """Completion tokens `start` (inclusive) to `end` (exclusive) came from `version`."""

    version: PolicyVersion
    start: int
    end: int


class Completion(msgspec.Struct, frozen=True):
    """One completion, as the engine produced it.

    Attributes:
        request_id: of the request that it answers, or of that sample (`GenerateRequest.samples`).
        token_ids: sampled tokens; the end-of-sequence token is included if it was sampled.
        log_probs: natural-log probability of each token under the distribution that was
            sampled from (after temperature), float32, same length as `token_ids`.
        finish_reason: `stop`, `length` or `abort`.
        version_spans: which version sampled which tokens; they cover all tokens without gaps.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    version_spans: list[VersionSpan]


class TrainSample(msgspec.Struct, frozen=True):
    """One sequence to learn from. R is the length of the response.

    Attributes:
        prompt_ids: prompt tokens; never trained on.
        response_ids: response tokens, length R.
        loss_mask: R ones and zeros; only ones enter the loss.
        advantages: R floats.
        old_log_probs: R log-probabilities of the policy before this update, or None where
            they are to be computed (`compute_log_prob`) or the update is on-policy.
        ref_log_probs: R log-probabilities of the frozen reference, or None without KL term.
        rollout_is_weights: R factors of the tokens' surrogates, which correct for a rollout engine
            that computes other probabilities than the trainer; None for 1 everywhere.
        old_values: R values by the critic before this update, or None without a critic.
        returns: R targets of the critic, or None without one.
        temperature: the response was sampled at this temperature; log-probabilities are
            those of logits / temperature.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    advantages: list[float] = []
    old_log_probs: list[float] | None = None
    ref_log_probs: list[float] | None = None
    rollout_is_weights: list[float] | None = None
    old_values: list[float] | None = None
    returns: list[float] | None = None
    temperature: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens together."""
        return len(self.prompt_ids) + len(self.response_ids)


class LogProbs(msgspec.Struct, frozen=True):
    """What the policy says of one sample's R response tokens.

    Attributes:
        log_probs: natural-log probabilities.
        entropy: of the distributions that the tokens are drawn from, nats.
        values: by the critic, of the states before the tokens; None without a critic.
    """

    log_probs: list[float]
    entropy: list[float]
    values: list[float] | None = None
