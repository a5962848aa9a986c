"""Values of the configuration by their dotted keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from minirl.config import MiniRLConfig

PATHS = (
    "actor.model_config.local_path",
    "rollout.local_path",
    "checkpoint_engine.root_dir",
    "trainer.run_dir",
    "data.task",
    "trainer.resume",
    "data.path",
    "data.eval_path",
    "reward.path",
    "debug.train_only",
)
"""Keys whose values are paths."""


def value_of(config: MiniRLConfig, key: str) -> Any:
    """The value of `section.key`."""
    return reduce(getattr, key.split("."), cast("Any", config))


def refuse_values(node: Any, source: str) -> None:
    """ConfigError, beginning with `source`, for a text somewhere in it that is no value.

    OmegaConf takes `???` for "no value yet" and would go on with the one there was; the zero byte
    is in no name of a file.
    """
    if node == "???":
        raise ConfigError(f"{source}: ??? is no value")
    if isinstance(node, str) and "\0" in node:
        raise ConfigError(f"{source}: there is a zero byte in it")
    if isinstance(node, Mapping | list):
        for value in node.values() if isinstance(node, Mapping) else node:
            refuse_values(value, source)


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
