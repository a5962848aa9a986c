"""The numbers of one step, from its samples."""

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from minirl.config import MiniRLConfig
from minirl.reward_mix import part_metrics
from minirl.sampling import Sample
from rl_core.trajectory import LogProbs


def step_metrics(
    samples: Sequence[Sample],
    trained: Sequence[Sample],
    old: Sequence[LogProbs],
    update: Mapping[str, float],
) -> dict[str, float]:
    """Reward, length, entropy and log-probability difference, with the update's own metrics.

    Args:
        samples: scored samples, all that were generated.
        trained: those that were trained on.
        old: the trainer's log-probabilities before the update, one per sample trained on; at least
            of those in the loss.
        update: what the train engine reported.
    """
    differences = _differences(trained, old)
    pairs = zip(trained, old, strict=True)
    entropies = [value for sample, item in pairs if any(sample.loss_mask) for value in item.entropy]
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
    """|rollout's - trainer's| log-probability of every token in the loss."""
    return [
        abs(rollout - trained)
        for sample, item in zip(samples, old, strict=True)
        if any(sample.loss_mask)
        for rollout, trained in zip(sample.completion.log_probs, item.log_probs, strict=True)
    ]


def collection_metrics(samples: Sequence[Sample], config: MiniRLConfig) -> dict[str, float]:
    """What dynamic sampling and the length penalty did; empty without them.

    Returns:
        `filter_groups/kept` and `filter_groups/generated`, numbers of groups, and
        `reward/overlong_penalty`, the mean of what was added to the rewards.
    """
    metrics: dict[str, float] = {}
    if config.algorithm.filter_groups.enable:
        metrics["filter_groups/kept"] = len({sample.group for sample in samples if sample.kept})
        metrics["filter_groups/generated"] = len({sample.group for sample in samples})
    if config.reward.overlong_buffer.enable:
        added = [
            sample.reward - sample.raw_reward
            for sample in samples
            if sample.reward is not None and sample.raw_reward is not None
        ]
        metrics["reward/overlong_penalty"] = fmean(added) if added else 0.0
    return metrics
