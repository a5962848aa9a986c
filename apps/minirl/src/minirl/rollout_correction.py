"""Truncated importance sampling between the rollout engine and the trainer.

The engine that samples and the trainer that learns compute the same model with other kernels, at
times in another precision, so their probabilities differ. Yao et al. 2025, "Your Efficient RL
Framework Secretly Brings You Off-Policy RL Training" (truncated importance sampling, TIS) weigh
each token's surrogate by min(p_trainer / p_rollout, C), taken before the update. verl calls it
`rollout_is`, TRL `vllm_importance_sampling_correction` with `vllm_importance_sampling_cap`.
"""

import math
from collections.abc import Sequence

import msgspec

from minirl.algorithm_config import RolloutCorrectionConfig
from minirl.sampling import Sample
from rl_core.trajectory import LogProbs, TrainSample

_MAX_LOG_RATIO = 20.0


def importance_ratios(
    trainer: Sequence[float], rollout: Sequence[float], *, whole: bool
) -> list[float]:
    """p_trainer / p_rollout of each token of one response, not yet capped.

    Args:
        trainer: log-probabilities by the trainer, before the update.
        rollout: those that the engine sampled by.
        whole: give every token the ratio of the whole response, the product of all.
    """
    logs = [mine - theirs for mine, theirs in zip(trainer, rollout, strict=True)]
    if whole:
        logs = [sum(logs)] * len(logs)
    return [math.exp(max(-_MAX_LOG_RATIO, min(_MAX_LOG_RATIO, value))) for value in logs]


def rollout_is_weights(
    trainer: Sequence[Sequence[float]],
    rollout: Sequence[Sequence[float]],
    config: RolloutCorrectionConfig,
) -> tuple[list[list[float]], dict[str, float]]:
    """Weights of all tokens of some responses, and what to report of them.

    Args:
        trainer: log-probabilities by the trainer, a sequence for each response.
        rollout: those that the engine sampled by.
        config: `rollout_is` is token or sequence.

    Returns:
        Weights up to `rollout_is_threshold`, in the shape of the input; `rollout_is/mean`, the mean
        weight, and `rollout_is/capped_fraction`, the share of tokens whose ratio was above.
    """
    cap, whole = config.rollout_is_threshold, config.rollout_is == "sequence"
    ratios = [
        importance_ratios(mine, theirs, whole=whole)
        for mine, theirs in zip(trainer, rollout, strict=True)
    ]
    weights = [[min(ratio, cap) for ratio in response] for response in ratios]
    tokens = max(1, sum(map(len, ratios)))
    metrics = {
        "rollout_is/mean": sum(map(sum, weights)) / tokens,
        "rollout_is/capped_fraction": sum(r > cap for response in ratios for r in response)
        / tokens,
    }
    return weights, metrics


def corrected(
    batch: Sequence[TrainSample],
    samples: Sequence[Sample],
    trainer: Sequence[LogProbs],
    config: RolloutCorrectionConfig,
) -> tuple[list[TrainSample], dict[str, float]]:
    """The batch with weights, and `rollout_is_weights`' metrics; as it is and {} where it is off.

    Args:
        batch: what is learned from.
        samples: where it comes from, one each; an aborted one is not in the loss, nor weighed.
        trainer: log-probabilities before the update, one each.
        config: what is asked for.
    """
    if config.rollout_is is None:
        return list(batch), {}
    whole = [
        index for index, item in enumerate(samples) if item.completion.finish_reason != "abort"
    ]
    weights, metrics = rollout_is_weights(
        [trainer[index].log_probs for index in whole],
        [samples[index].completion.log_probs for index in whole],
        config,
    )
    found = dict(zip(whole, weights, strict=True))
    return [
        msgspec.structs.replace(
            sample, rollout_is_weights=found.get(index, [1.0] * len(sample.response_ids))
        )
        for index, sample in enumerate(batch)
    ], metrics
