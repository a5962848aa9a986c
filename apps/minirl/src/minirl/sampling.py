"""From prompts to requests, and from completions to samples."""

from collections.abc import Sequence

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
