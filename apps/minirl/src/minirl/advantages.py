"""Advantages from rewards."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

_EPSILON = 1e-6


def grpo(
    rewards: Sequence[float | None], groups: Sequence[int], *, norm_by_std: bool
) -> list[float | None]:
    """Group-relative advantages: reward minus the group's mean, over its standard deviation.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2. The standard deviation is the sample one
    (n - 1), as in verl and TRL; without `norm_by_std` it is left out (Dr. GRPO, arXiv:2503.20783).

    Args:
        rewards: one per sample; None where a sample is not rewarded.
        groups: the prompt's group of each sample.
        norm_by_std: divide by the group's standard deviation.

    Returns:
        One advantage per sample; None where the reward is None. A group of one gives 0.
    """
    members: dict[int, list[float]] = defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            members[group].append(reward)
    scale = {group: _moments(values, norm_by_std=norm_by_std) for group, values in members.items()}
    return [
        None if reward is None else (reward - scale[group][0]) / scale[group][1]
        for reward, group in zip(rewards, groups, strict=True)
    ]


def _moments(values: Sequence[float], *, norm_by_std: bool) -> tuple[float, float]:
    mean = fmean(values)
    if not norm_by_std or len(values) < 2:
        return mean, 1.0
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, variance**0.5 + _EPSILON
