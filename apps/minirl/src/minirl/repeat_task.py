"""The default task `repeat`: asked `say 7:`, answer with sevens.

The reward is the share of the first 8 characters that are the asked digit, so a model that always
gives the same answer gets 0.1 and the random model about 0.01. The prompts are four verbs with ten
digits. Eight of these pairs are held out; each verb and each digit stays in training, so the
held-out reward tells copying the digit from knowing the prompts by heart.
"""

from collections.abc import Sequence
from typing import Any

LENGTH = 8
"""Characters that count; what is missing counts as wrong."""

VERBS = ("say", "print", "write", "repeat")
DIGITS = tuple("0123456789")
_HELD_OUT = frozenset({(verb, digit) for digit in range(8) for verb in [digit % len(VERBS)]})


def train_prompts() -> list[str]:
    """The 32 prompts to train on, in a fixed order."""
    return _prompts(held_out=False)


def held_out_prompts() -> list[str]:
    """The 8 prompts to evaluate on; none of them is trained on."""
    return _prompts(held_out=True)


def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Rewards from 0 to 1, one a completion (a reward function as `reward.path` takes it)."""
    return [reward_of(*pair) for pair in zip(prompts, completions, strict=True)]


def reward_of(prompt: str, completion: str) -> float:
    """Share of the first `LENGTH` characters that equal the digit of `prompt`."""
    digit = prompt.rstrip(":")[-1]
    return completion[:LENGTH].count(digit) / LENGTH


def _prompts(*, held_out: bool) -> list[str]:
    return [
        f"{verb} {digit}:"
        for row, verb in enumerate(VERBS)
        for column, digit in enumerate(DIGITS)
        if ((row, column) in _HELD_OUT) == held_out
    ]
