"""Advantages from rewards: one pure function for each estimator.

All take one reward per sample, None where a sample is not rewarded, and return one advantage per
sample, None where the reward is None. It holds for every token of the response.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean

from minirl.algorithm_config import AlgorithmConfig

Rewards = Sequence[float | None]
Advantages = list[float | None]

_EPSILON = 1e-6
_VARIANCE_EPSILON = 1e-8


def estimate_advantages(
    algorithm: AlgorithmConfig, rewards: Rewards, groups: Sequence[int], lengths: Sequence[int]
) -> Advantages:
    """By the configured estimator; for ppo the rewards, until the critic was asked (`gae`).

    Args:
        algorithm: `adv_estimator` and `norm_adv_by_std`.
        rewards: one per sample.
        groups: the prompt's group of each sample.
        lengths: tokens of each response.

    Errors: ValueError for an estimator that is not known.
    """
    match algorithm.adv_estimator:
        case "grpo":
            return grpo(rewards, groups, norm_by_std=algorithm.norm_adv_by_std)
        case "dr_grpo":
            return dr_grpo(rewards, groups)
        case "rloo":
            return rloo(rewards, groups)
        case "reinforce_plus_plus":
            return reinforce_plus_plus(rewards, lengths)
        case "ppo":
            return list(rewards)
    msg = f"no advantage estimator {algorithm.adv_estimator!r}"
    raise ValueError(msg)


def grpo(rewards: Rewards, groups: Sequence[int], *, norm_by_std: bool) -> Advantages:
    """Group-relative advantages: reward minus the group's mean, over its standard deviation.

    Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), section 4.1.2 (outcome supervision):
    A_i = (r_i - mean(r)) / std(r). The standard deviation is the sample one (n - 1), as in verl
    and TRL; without `norm_by_std` it is left out. A group of one gives 0.
    """

    def scaled(values: Sequence[float]) -> Callable[[float], float]:
        mean, scale = _moments(values, norm_by_std=norm_by_std)
        return lambda reward: (reward - mean) / scale

    return _by_group(rewards, groups, scaled)


def dr_grpo(rewards: Rewards, groups: Sequence[int]) -> Advantages:
    """Reward minus the group's mean: GRPO without the bias towards easy and hard prompts.

    Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv:2503.20783), section 3.2:
    A_i = r_i - mean(r). The other half of it, a constant instead of each response's length, is
    `algorithm.loss_agg_mode=seq-mean-token-sum-norm`.
    """
    return grpo(rewards, groups, norm_by_std=False)


def rloo(rewards: Rewards, groups: Sequence[int]) -> Advantages:
    """REINFORCE leave-one-out: reward minus the mean of the *other* samples of the group.

    Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; for language models
    Ahmadian et al. 2024, "Back to Basics" (arXiv:2402.14740):
    A_i = r_i - sum_{j != i} r_j / (k - 1), which is k / (k - 1) times the distance from the mean. A
    group of one has no baseline and gives 0.
    """

    def without_own(values: Sequence[float]) -> Callable[[float], float]:
        if len(values) < 2:
            return lambda _: 0.0
        total, others = sum(values), len(values) - 1
        return lambda reward: reward - (total - reward) / others

    return _by_group(rewards, groups, without_own)


def reinforce_plus_plus(rewards: Rewards, lengths: Sequence[int]) -> Advantages:
    """REINFORCE++: the reward normalised over the whole batch, all prompts together.

    Hu et al. 2025, "REINFORCE++" (arXiv:2501.03262), global advantage normalisation:
    A = (r - mean) / std over all tokens of the batch, so that a response counts as often as it has
    tokens. With neither discount nor a KL term in the reward (ours is in the loss, `kl_coef`),
    every token of a response has its response's reward. The variance is the unbiased one, as in
    verl's `masked_whiten`.

    Args:
        rewards: one per sample.
        lengths: tokens of each response.
    """
    counted = [
        (reward, length)
        for reward, length in zip(rewards, lengths, strict=True)
        if reward is not None and length
    ]
    tokens = sum(length for _, length in counted)
    if tokens < 2:
        return [None if reward is None else 0.0 for reward in rewards]
    mean = sum(reward * length for reward, length in counted) / tokens
    squares = sum((reward - mean) ** 2 * length for reward, length in counted)
    scale = (squares / (tokens - 1) + _VARIANCE_EPSILON) ** 0.5
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def _by_group(
    rewards: Rewards,
    groups: Sequence[int],
    advantage: Callable[[Sequence[float]], Callable[[float], float]],
) -> Advantages:
    """`advantage` is given a group's rewards and says what one of them is worth."""
    members: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            members[group].append(reward)
    worth = {group: advantage(values) for group, values in members.items()}
    return [
        None if reward is None else worth[group](reward)
        for reward, group in zip(rewards, groups, strict=True)
    ]


def _moments(values: Sequence[float], *, norm_by_std: bool) -> tuple[float, float]:
    mean = fmean(values)
    if not norm_by_std or len(values) < 2:
        return mean, 1.0
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, variance**0.5 + _EPSILON
