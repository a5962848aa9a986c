"""Values of the configuration by their dotted keys."""

from __future__ import annotations

import os
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from minirl.config import MiniRLConfig

PATHS = (
    "actor.model_config.local_path",
    "rollout.local_path",
    "checkpoint_engine.root_dir",
    "trainer.run_dir",
    "data.task",
    "data.path",
    "data.eval_path",
    "reward.path",
    "debug.train_only",
)
"""Keys whose values are paths."""


def value_of(config: MiniRLConfig, key: str) -> Any:
    """The value of `section.key`."""
    return reduce(getattr, key.split("."), cast("Any", config))


def expand_home(config: MiniRLConfig) -> None:
    """Replace `~` in paths, in place: a shell leaves that of key=~/path as it is."""
    for key in PATHS:
        section, _, name = key.rpartition(".")
        value = value_of(config, key)
        if value is not None:
            setattr(value_of(config, section), name, _expanded(value))


def _expanded(value: str | list[str]) -> str | list[str]:
    if isinstance(value, list):
        return [os.path.expanduser(item) for item in value]
    return os.path.expanduser(value)
