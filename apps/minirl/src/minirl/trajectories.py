"""Samples as they are written down: everything needed to trace a token to its weights."""

import msgspec

from minirl.sampling import Sample
from rl_core.trajectory import SamplingParams


class Trajectory(msgspec.Struct):
    """One sample, a line of `trajectories.jsonl`.

    Attributes:
        index: number of the sample in the run.
        group_index: number of the prompt in the run; samples of one prompt are compared.
        rollout_id: the episode; segments of one episode share it and are rewarded once.
        session_id: the conversation that the episode belongs to; one of its own in single turn.
        prompt: the user's text.
        prompt_ids: prompt tokens as the engine got them, chat template applied.
        response: response, decoded.
        response_ids: sampled tokens.
        loss_mask: 1 for tokens that entered the loss.
        rollout_log_probs: of the distribution sampled from, as the engine reported them.
        policy_version_spans: (version, start, end) in response tokens.
        finish_reason: stop, length or abort.
        sampling_params: how it was sampled, seed included.
        seed: the request's seed.
        raw_reward: weighted sum of what the reward functions returned; `reward` is what was
            trained on.
        reward: see `raw_reward`.
        advantage: of every token of the response; None without a reward, or where the sample's
            group was left out (dynamic sampling).
        advantages: with a critic those of the tokens, `advantage` being their mean; else None.
        weights_digest: digest of digests of the version served, or None without verification.
        rewards: what each reward function returned, by its name.
    """

    index: int
    group_index: int
    rollout_id: str
    session_id: str
    prompt: str
    prompt_ids: list[int]
    response: str
    response_ids: list[int]
    loss_mask: list[int]
    rollout_log_probs: list[float]
    policy_version_spans: list[tuple[str, int, int]]
    finish_reason: str
    sampling_params: SamplingParams
    seed: int | None
    raw_reward: float | None
    reward: float | None
    advantage: float | None
    weights_digest: str | None
    rewards: dict[str, float | None] = {}
    advantages: list[float] | None = None


def to_trajectory(
    sample: Sample, index: int, group_index: int, weights_digest: str | None
) -> Trajectory:
    """The record of one sample of a single-turn episode."""
    completion = sample.completion
    return Trajectory(
        index=index,
        group_index=group_index,
        rollout_id=completion.request_id,
        session_id=completion.request_id,
        prompt=sample.prompt.text,
        prompt_ids=sample.prompt.prompt_ids,
        response=sample.text,
        response_ids=completion.token_ids,
        loss_mask=sample.loss_mask,
        rollout_log_probs=completion.log_probs,
        policy_version_spans=[
            (str(span.version), span.start, span.end) for span in completion.version_spans
        ],
        finish_reason=completion.finish_reason,
        sampling_params=sample.sampling,
        seed=sample.sampling.seed,
        raw_reward=sample.raw_reward,
        reward=sample.reward,
        rewards=sample.rewards,
        advantage=sample.advantage,
        advantages=sample.advantages,
        weights_digest=weights_digest,
    )
