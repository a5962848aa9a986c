"""Scoring completions: which reward function, and what may come out of it.

A reward function has TRL's signature, `f(prompts, completions, completion_ids, **columns)`, sync or
async, called with keyword arguments. `prompts` and `completions` are texts where the data set gives
texts, and lists of messages where it gives chats (a completion is then
`[{"role": "assistant", "content": ...}]`); every other key of the data set arrives as a list of its
values, one a sample, None where a prompt lacks it. The function returns one number a sample; None
means that the sample is not rewarded and leaves it out of the loss. Unlike TRL, no `trainer_state`
is passed.
"""

import contextlib
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from minirl import repeat_task
from minirl.prompt_file import RESERVED
from minirl.prompts import Prompt
from minirl.reward_messages import Loaded, Target
from minirl.reward_scorer import FunctionScorer, RewardError, checked
from minirl.task_file import is_task_file
from rl_core.errors import ConfigError

__all__ = ["InProcessScorer", "RewardError", "RewardSettings", "Scorer", "load_scorer"]

DEFAULT_NAME = "reward"
_PATH_KEY = "reward.path"
ANSWERS = ("completions", "completion_ids")


class RewardSettings(Protocol):
    """Who scores: one function."""

    @property
    def path(self) -> str | None:
        """FILE.py[:NAME], or None for the task's own."""

    @property
    def timeout_s(self) -> float:
        """Longest call."""


class TaskSettings(Protocol):
    """The part of the configuration that says whose own scorer is the default (`data.*`)."""

    task: str
    path: str | None
    reasoning_gym: str | Mapping[str, Any] | None


class Scorer(Protocol):
    """Rewards completions. Not thread-safe, but for `cut_short`; `close()` when the run ends."""

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        first: int = 0,
    ) -> list[float | None]:
        """One reward a completion, None where it is not rewarded.

        Args:
            prompts: the prompt of each completion, repeated for those of one group.
            completions: decoded without special tokens.
            completion_ids: as sampled.
            first: position of the first one in the batch, by which errors count.

        Errors: RewardError naming the samples at fault.
        """

    def cut_short(self) -> None:
        """Let a call in another thread fail soon, if it can; none is served afterwards."""

    def close(self) -> None:
        """Release what the scorer holds. Idempotent."""


class InProcessScorer:
    """A trusted reward function (one of ours), called directly."""

    def __init__(self, function: Callable[..., Sequence[float | None]], name: str) -> None:
        self._function = function
        self._name = name

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        first: int = 0,
    ) -> list[float | None]:
        """See `Scorer.score`."""
        texts = [prompt.text for prompt in prompts]
        values = self._function(
            prompts=texts, completions=completions, completion_ids=completion_ids
        )
        return checked(values, prompts, self._name, first)

    def cut_short(self) -> None:
        """Nothing to end: it takes no time."""

    def close(self) -> None:
        """Nothing to release."""


def load_scorer(
    reward: RewardSettings,
    data: TaskSettings,
    columns: Collection[str],
    log_path: Path | None = None,
    held_out: Collection[str] | None = None,
) -> Scorer:
    """The scorer that `reward.path` names, else that of the task.

    Args:
        reward: the function; `minirl.reward_mix` puts several together.
        data: `data` of the configuration.
        columns: names of the data set's columns (`PromptSet.columns`).
        log_path: file that gets what a reward function prints; None is stderr.
        held_out: names of the columns of held-out prompts; None without any.

    Errors: ConfigError if there is no such file or function, importing it fails, it needs a
    column that one of the two lacks, or prompts from a file come without a reward function.
    """
    if not (reward.timeout_s > 0 and math.isfinite(reward.timeout_s)):
        raise ConfigError(f"reward.timeout_s={reward.timeout_s}: must be a positive number")
    file, key = _function_file(reward, data)
    if file is not None:
        target = file_target(file, key)
        known = {*columns, *(held_out or ())}
        scorer = FunctionScorer(target, reward.timeout_s, log_path, columns=sorted(known))
        with contextlib.ExitStack() as stack:
            stack.callback(scorer.close)
            _check_arguments(scorer.signature, f"{key}={file}")
            _check_columns(scorer.signature, columns, f"{key}={file}", "the data set")
            if held_out is not None:
                whose = "the held-out set (data.eval_path)"
                _check_columns(scorer.signature, held_out, f"{key}={file}", whose)
            stack.pop_all()
        return scorer
    if data.path is not None:
        raise ConfigError("data.path needs reward.path: prompts from a file have no own reward")
    if data.reasoning_gym is not None:
        return _reasoning_gym_scorer(data.reasoning_gym, reward.timeout_s, log_path)
    return InProcessScorer(repeat_task.reward, "repeat")


def _function_file(reward: RewardSettings, data: TaskSettings) -> tuple[str | None, str]:
    """FILE.py[:NAME] of the function and the key that gives it; None if the task is ours."""
    if reward.path is None and is_task_file(data.task) and data.path is None:
        return data.task, "data.task"
    return reward.path, _PATH_KEY


def file_target(text: str, key: str = _PATH_KEY) -> Target:
    """Split FILE.py[:NAME]; ConfigError if there is no such file."""
    file, separator, name = text.rpartition(":")
    if not separator or not name.isidentifier():
        file, name = text, DEFAULT_NAME
    path = Path(os.path.expanduser(file))  # as it is where there is no such user
    if not path.is_file():
        raise ConfigError(f"{key}={text}: no file {path}")
    return Target(name=name, path=str(path.resolve()))


def _check_columns(signature: Loaded, columns: Collection[str], given: str, whose: str) -> None:
    known = [*RESERVED, *columns]
    missing = [name for name in signature.required if name not in known]
    if missing:
        raise ConfigError(f"{given}: it needs {missing[0]!r}, {whose} has {', '.join(known)}")


def _check_arguments(signature: Loaded, given: str) -> None:
    if not signature.takes_any and not {*ANSWERS} & {*signature.parameters}:
        raise ConfigError(f"{given}: it takes none of {', '.join(ANSWERS)}")


def _reasoning_gym_scorer(
    value: str | Mapping[str, Any], timeout_s: float, log_path: Path | None
) -> Scorer:
    from minirl.reasoning_gym_task import Problems, tagged

    problems = Problems.from_config(value, seed=0)
    arguments = {
        "name": problems.name,
        "options": dict(problems.options),
        "extract": problems.extract,
    }
    target = Target(name="make_reward", module="minirl.reasoning_gym_task", arguments=arguments)
    return FunctionScorer(target, timeout_s, log_path, encode_column=tagged)
