"""The numbers of one step, from its samples."""

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from minirl.reward_mix import part_metrics
from minirl.sampling import Sample
from rl_core.trajectory import LogProbs


def step_metrics(
    samples: Sequence[Sample], old: Sequence[LogProbs], update: Mapping[str, float]
) -> dict[str, float]:
    """Reward, length, entropy and log-probability difference, with the update's own metrics.

    Args:
        samples: scored samples.
        old: the trainer's log-probabilities before the update, one per sample.
        update: what the train engine reported.
    """
    differences = _differences(samples, old)
    entropies = [value for item in old for value in item.entropy]
    return {
        **sample_metrics(samples),
        "rollout_train_logprob_diff/mean": fmean(differences) if differences else 0.0,
        "rollout_train_logprob_diff/max": max(differences, default=0.0),
        **update,
        "entropy": fmean(entropies) if entropies else 0.0,
    }


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What scored samples tell without a trainer: rewards and lengths."""
    rewards = [sample.raw_reward for sample in samples if sample.raw_reward is not None]
    return {
        "reward/mean": fmean(rewards) if rewards else 0.0,
        "reward/std": pstdev(rewards) if rewards else 0.0,
        **part_metrics(sample.rewards for sample in samples),
        "response_length/mean": fmean(len(s.completion.token_ids) for s in samples),
    }


def _differences(samples: Sequence[Sample], old: Sequence[LogProbs]) -> list[float]:
    """|rollout's - trainer's| log-probability of every token that the same version sampled."""
    return [
        abs(rollout - trained)
        for sample, item in zip(samples, old, strict=True)
        if sample.completion.finish_reason != "abort"
        for rollout, trained in zip(sample.completion.log_probs, item.log_probs, strict=True)
    ]
