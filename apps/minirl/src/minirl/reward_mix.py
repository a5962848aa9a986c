"""Several reward functions with weights: what is trained on, and what each of them says."""

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple, Protocol

from minirl.prompts import Prompt
from minirl.reward_messages import Target
from minirl.rewards import DEFAULT_NAME, Scorer, TaskSettings, file_target, load_scorer
from rl_core.errors import ConfigError


class MixSettings(Protocol):
    """The section `reward` of the configuration."""

    path: Any
    weights: list[float] | None
    timeout_s: float


class _Single(NamedTuple):
    """One function, as `load_scorer` takes it."""

    path: str | None
    timeout_s: float


class Score(NamedTuple):
    """Rewards of one sample.

    Attributes:
        total: weighted sum over the functions that returned a number; None if none did.
        parts: what each function returned, by its name.
    """

    total: float | None
    parts: dict[str, float | None]


class RewardMix:
    """Scores with every function and adds up, as TRL does: None counts for nothing in the sum.

    A sample for which all functions return None has no reward and is left out of the loss (TRL
    gives it 0).
    """

    def __init__(self, scorers: Mapping[str, Scorer], weights: Sequence[float]) -> None:
        """`weights`: one for each of `scorers`, in their order."""
        self._scorers = dict(scorers)
        self._weights = dict(zip(scorers, weights, strict=True))

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        first: int = 0,
    ) -> list[Score]:
        """One score a completion; arguments and errors as in `minirl.rewards.Scorer.score`."""
        columns = {
            name: scorer.score(prompts, completions, completion_ids, first)
            for name, scorer in self._scorers.items()
        }
        rows = (
            {name: values[at] for name, values in columns.items()} for at in range(len(prompts))
        )
        return [Score(self._total(row), row) for row in rows]

    def cut_short(self) -> None:
        """Let a call in another thread fail soon; none is served afterwards."""
        for scorer in self._scorers.values():
            scorer.cut_short()

    def close(self) -> None:
        """Release what the scorers hold. Idempotent."""
        for scorer in self._scorers.values():
            scorer.close()

    def _total(self, row: Mapping[str, float | None]) -> float | None:
        counted = [self._weights[name] * value for name, value in row.items() if value is not None]
        return math.fsum(counted) if counted else None


def load_rewards(
    reward: MixSettings,
    data: TaskSettings,
    columns: Collection[str],
    log_path: Path | None = None,
    held_out: Collection[str] | None = None,
) -> RewardMix:
    """The functions that `reward.path` names, else the task's own.

    Args:
        reward: `reward` of the configuration.
        data: `data` of the configuration.
        columns: names of the data set's columns (`PromptSet.columns`).
        log_path: file that gets what reward functions print; None is stderr.
        held_out: names of the columns of held-out prompts; None without any.

    Errors: ConfigError if the weights do not match the functions, and those of
    `minirl.rewards.load_scorer`.
    """
    paths = _paths(reward.path)
    weights = _weights(reward.weights, paths)
    names = _names([file_target(path) for path in paths]) or [_own_name(data)]
    functions: list[str | None] = [*paths] or [None]
    scorers: dict[str, Scorer] = {}
    with contextlib.ExitStack() as stack:
        for name, path in zip(names, functions, strict=True):
            single = _Single(path, reward.timeout_s)
            scorers[name] = load_scorer(single, data, columns, log_path, held_out)
            stack.callback(scorers[name].close)
        stack.pop_all()
    return RewardMix(scorers, weights)


def part_metrics(parts: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """`reward/<name>/mean` and `/std` over the samples for which the function had a number."""
    values: dict[str, list[float]] = {}
    for row in parts:
        for name, value in row.items():
            values.setdefault(name, [])
            if value is not None:
                values[name].append(value)
    metrics = {}
    for name, found in values.items():
        metrics[f"reward/{name}/mean"] = fmean(found) if found else 0.0
        metrics[f"reward/{name}/std"] = pstdev(found) if found else 0.0
    return metrics


def _paths(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _weights(given: Sequence[float] | None, paths: Sequence[str]) -> list[float]:
    count = len(paths) or 1
    if given is None:
        return [1.0] * count
    if len(given) != count:
        whom = ", ".join(paths) if paths else "the task's own"
        msg = f"reward.weights={list(given)}: {len(given)} weights for {count} reward functions"
        raise ConfigError(f"{msg} ({whom})")
    return list(given)


def _own_name(data: TaskSettings) -> str:
    """Of the task's own reward."""
    if data.reasoning_gym is None:
        return Path(data.task).stem
    given = data.reasoning_gym
    return given if isinstance(given, str) else str(given["name"])


def _names(targets: Sequence[Target]) -> list[str]:
    """What metrics call the functions: by name, by file where several have that name."""
    short = [_short_name(target) for target in targets]
    taken = Counter(short)
    names = [
        name if taken[name] == 1 else f"{Path(target.path or '').stem}.{target.name}"
        for name, target in zip(short, targets, strict=True)
    ]
    again = Counter(names)
    return [name if again[name] == 1 else f"{name}_{at}" for at, name in enumerate(names, start=1)]


def _short_name(target: Target) -> str:
    return Path(target.path or "").stem if target.name == DEFAULT_NAME else target.name
