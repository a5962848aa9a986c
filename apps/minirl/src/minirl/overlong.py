"""DAPO's soft overlong punishment."""

from collections.abc import Sequence

from minirl.algorithm_config import OverlongBufferConfig
from minirl.sampling import Sample


def overlong_penalty(length: int, longest: int, buffer: OverlongBufferConfig) -> float:
    """What is added to the reward: 0 down to -`penalty_factor`.

    Yu et al. 2025, "DAPO" (arXiv:2503.14476), section 3.4, soft overlong punishment: 0 up to
    longest - len tokens, then falling linearly to -penalty_factor at `longest`.

    Args:
        length: tokens of the response.
        longest: `rollout.max_completion_length`; no response is longer.
        buffer: `enable` is not looked at.
    """
    beyond = length - (longest - buffer.len)
    return -max(0, beyond) / buffer.len * buffer.penalty_factor


def shape_rewards(samples: Sequence[Sample], longest: int, buffer: OverlongBufferConfig) -> None:
    """Set what each scored sample is trained on: its reward as it is, or less the penalty."""
    for sample in samples:
        sample.reward = sample.raw_reward
        if buffer.enable and sample.raw_reward is not None:
            length = len(sample.completion.token_ids)
            sample.reward = sample.raw_reward + overlong_penalty(length, longest, buffer)
