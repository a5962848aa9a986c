"""From prompts to requests, and from completions to samples."""

from collections.abc import Callable, Sequence

import msgspec
import xxhash

from minirl.config import RolloutConfig
from minirl.prompts import Prompt
from rl_core.trajectory import Completion, GenerateRequest, SamplingParams, TrainSample

_SEED_BITS = 31


class Sample(msgspec.Struct):
    """One completion with all that is known of it.

    Attributes:
        prompt: what was asked.
        group: number of the prompt within the batch; samples of a group are compared.
        completion: what the engine produced.
        text: the completion, decoded, special tokens left out.
        sampling: how it was sampled.
        raw_reward: as scored; None before scoring, or where the sample is not rewarded.
        reward: what is trained on: `raw_reward`, less what its length costs.
        rewards: what each reward function returned, by its name.
        advantage: None before `advantage`, or where there is no reward.
        advantages: with a critic those of the tokens, `advantage` being their mean; else None.
        kept: whether it is trained on; false for groups that dynamic sampling left out.
    """

    prompt: Prompt
    group: int
    completion: Completion
    text: str
    sampling: SamplingParams
    raw_reward: float | None = None
    reward: float | None = None
    rewards: dict[str, float | None] = {}
    advantage: float | None = None
    advantages: list[float] | None = None
    kept: bool = True

    @property
    def loss_mask(self) -> list[int]:
        """1 for every sampled token; 0 where the sample was aborted, left out or not rewarded."""
        trained = self.kept and self.advantage is not None
        trained = trained and self.completion.finish_reason != "abort"
        return [int(trained)] * len(self.completion.token_ids)

    def to_train_sample(self) -> TrainSample:
        """What the train engine learns from."""
        size = len(self.completion.token_ids)
        return TrainSample(
            prompt_ids=self.prompt.prompt_ids,
            response_ids=self.completion.token_ids,
            loss_mask=self.loss_mask,
            advantages=[self.advantage or 0.0] * size,
            temperature=self.sampling.temperature,
        )


class Question:
    """What is asked at once: so many completions of each prompt.

    Attributes:
        prompts: what is asked.
        copies: completions of each.
        requests: for the engine, the copies of a prompt one after the other.
    """

    def __init__(
        self, prompts: Sequence[Prompt], requests: Sequence[GenerateRequest], first_group: int = 0
    ) -> None:
        """`requests` are those of `make_requests`; samples count groups from `first_group`."""
        self.prompts = prompts
        self.requests = requests
        self.copies = len(requests) // len(prompts)
        self._first_group = first_group
        self._positions = {request.request_id: at for at, request in enumerate(requests)}

    def group_of(self, request_id: str) -> int:
        """Which prompt a request asks, counted from 0."""
        return self._positions[request_id] // self.copies

    def requests_of(self, group: int) -> Sequence[GenerateRequest]:
        """Those that ask one prompt."""
        return self.requests[group * self.copies : (group + 1) * self.copies]

    def samples(
        self,
        completions: Sequence[Completion],
        decode: Callable[[Sequence[Sequence[int]]], list[str]],
    ) -> list[Sample]:
        """Of some of the requests, or all, in the order of their completions."""
        texts = decode([completion.token_ids for completion in completions])
        return [
            self._sample(completion, text)
            for completion, text in zip(completions, texts, strict=True)
        ]

    def _sample(self, completion: Completion, text: str) -> Sample:
        at = self._positions[completion.request_id]
        group, sampling = at // self.copies, self.requests[at].sampling
        return Sample(self.prompts[group], self._first_group + group, completion, text, sampling)


def sampling_params(rollout: RolloutConfig, seed: int) -> SamplingParams:
    """The configured sampling, with a seed of its own."""
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_completion_length,
        seed=seed,
    )


def make_requests(
    prompts: Sequence[Prompt], copies: int, rollout: RolloutConfig, label: str, run_seed: int
) -> list[GenerateRequest]:
    """`copies` requests for each prompt, prompts in order.

    Args:
        prompts: what to ask.
        copies: completions per prompt.
        rollout: how to sample.
        label: unique in the run, such as `s12`; part of request ids and seeds.
        run_seed: the run's seed; equal seeds give equal requests.
    """
    requests = []
    for position, prompt in enumerate(prompts):
        for copy in range(copies):
            request_id = f"{label}.p{position}.g{copy}"
            sampling = sampling_params(rollout, derive_seed(run_seed, request_id))
            requests.append(GenerateRequest(request_id, prompt.prompt_ids, sampling))
    return requests


def derive_seed(run_seed: int, name: str) -> int:
    """A seed for `name`, independent of all others of the run."""
    return xxhash.xxh3_64_intdigest(name.encode(), seed=run_seed) % (1 << _SEED_BITS)
