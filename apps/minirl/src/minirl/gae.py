"""PPO's advantages, by a critic: generalized advantage estimation."""

from collections.abc import Sequence

import msgspec

from minirl.algorithm_config import AlgorithmConfig
from minirl.sampling import Sample
from rl_core.trajectory import LogProbs, TrainSample

_VARIANCE_EPSILON = 1e-8


def gae(reward: float, values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Advantages of the T tokens of one response whose only reward comes with its last token.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation" (arXiv:1506.02438), eq. 16: A_t = sum_l (gamma lam)^l d_{t+l} with
    d_t = r_t + gamma V(s_{t+1}) - V(s_t). After the last token nothing follows: V = 0, also where
    the response was cut at its limit, as in verl and TRL.

    Args:
        reward: of the response.
        values: T values by the critic, of the state before each token.
        gamma: discount.
        lam: 0 trusts the critic one token ahead, 1 takes the whole rest of the response.
    """
    advantages: list[float] = []
    following, advantage = 0.0, 0.0
    for value in reversed(values):
        gained = reward if not advantages else 0.0
        advantage = gained + gamma * following - value + gamma * lam * advantage
        advantages.append(advantage)
        following = value
    return advantages[::-1]


def whitened(responses: Sequence[Sequence[float]]) -> list[list[float]]:
    """Advantages of several responses with mean 0 and variance 1 over all their tokens.

    The variance is the unbiased one, as in verl's `masked_whiten`.
    """
    flat = [value for response in responses for value in response]
    if len(flat) < 2:
        return [[0.0] * len(response) for response in responses]
    mean = sum(flat) / len(flat)
    variance = sum((value - mean) ** 2 for value in flat) / (len(flat) - 1)
    scale = (variance + _VARIANCE_EPSILON) ** 0.5
    return [[(value - mean) / scale for value in response] for response in responses]


def with_critic(
    batch: Sequence[TrainSample],
    samples: Sequence[Sample],
    before: Sequence[LogProbs],
    algorithm: AlgorithmConfig,
) -> tuple[list[TrainSample], dict[str, float]]:
    """The batch with PPO's columns and a metric; as it is and {} without a critic.

    A sample's `advantages` become those of its tokens, its `advantage` their mean.

    Args:
        batch: what is learned from.
        samples: where it comes from, one each.
        before: values before the update, one each.
        algorithm: `adv_estimator`, `gamma` and `lam`.

    Returns:
        The batch with old values, returns (advantage plus value, before whitening) and whitened
        advantages, and `critic/explained_variance`: 1 where values equal the returns, 0 where they
        tell no more than the mean return would.
    """
    if algorithm.adv_estimator != "ppo":
        return list(batch), {}
    learned = [index for index, sample in enumerate(batch) if any(sample.loss_mask)]
    values = {index: scores.values or [] for index, scores in enumerate(before)}
    plain = [
        gae(samples[index].reward or 0.0, values[index], algorithm.gamma, algorithm.lam)
        for index in learned
    ]
    advantages = dict(zip(learned, whitened(plain), strict=True))
    returns = {
        index: [a + v for a, v in zip(parts, values[index], strict=True)]
        for index, parts in zip(learned, plain, strict=True)
    }
    nothing = {index: [0.0] * len(sample.response_ids) for index, sample in enumerate(batch)}
    result = [
        msgspec.structs.replace(
            sample,
            advantages=advantages.get(index, nothing[index]),
            returns=returns.get(index, nothing[index]),
            old_values=values[index],
        )
        for index, sample in enumerate(batch)
    ]
    for index in learned:
        parts = advantages[index]
        samples[index].advantages = parts
        samples[index].advantage = sum(parts) / len(parts)
    explained = explained_variance(
        [value for index in learned for value in values[index]],
        [value for index in learned for value in returns[index]],
    )
    return result, {"critic/explained_variance": explained}


def explained_variance(values: Sequence[float], returns: Sequence[float]) -> float:
    """1 - var(returns - values) / var(returns); 0 where the returns do not vary."""
    errors = [target - value for value, target in zip(values, returns, strict=True)]
    spread = _variance(returns)
    return 1 - _variance(errors) / spread if spread > _VARIANCE_EPSILON else 0.0


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / max(1, len(values))
    return sum((value - mean) ** 2 for value in values) / max(1, len(values))
