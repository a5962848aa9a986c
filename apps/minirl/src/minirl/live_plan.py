"""What live verification needs: a backend that knows its engine's layout and can look inside."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minirl.config import MiniRLConfig
from minirl.model_check import read_model_config
from rl_core import plugins
from rl_core.errors import ConfigError
from rl_core.interfaces import RolloutBackend, SupportsLiveDigests, SupportsPerturbation
from rl_core.layout import LayoutSpec

_LIVE = "checkpoint_engine.debug.verify_live_weights=true"
_PERTURB = "checkpoint_engine.debug.perturb_before_sync=true"


def live_layout(config: MiniRLConfig, values: Mapping[str, Any], device: str) -> LayoutSpec | None:
    """The layout that live verification compares with; None if it is off.

    Args:
        config: the configuration.
        values: for the rollout backend's configuration class.
        device: cpu, cuda or npu.

    Errors: ConfigError if the backend, or its table, cannot do what is asked for.
    """
    debug = config.checkpoint_engine.debug
    if debug.perturb_before_sync:
        _check_perturbation(config)
    if not debug.verify_live_weights:
        return None
    backend = plugins.load_backend(plugins.ROLLOUT_BACKENDS, config.rollout.name)
    if not issubclass(plugins.load_object(backend.adapter), SupportsLiveDigests):
        raise ConfigError(f"{_LIVE}: rollout.name={backend.name} has no live digests")
    _check_writable(Path(config.checkpoint_engine.root_dir))
    try:
        return layout_of(backend, Path(values["local_path"]), values, device)
    except ConfigError as error:
        raise ConfigError(f"{_LIVE}: {error}") from error


def layout_of(
    backend: RolloutBackend, model_path: Path, values: Mapping[str, Any], device: str
) -> LayoutSpec:
    """How the engine of `backend` lays out the model in `model_path`.

    Other arguments, and errors, as in `live_layout`.
    """
    if backend.layout is None:
        raise ConfigError(f"rollout.name={backend.name}: the backend has no layout tables")
    given = {**values, "local_path": str(model_path)}
    engine = plugins.build_config(plugins.load_object(backend.config_cls), given, "rollout")
    model_config = read_model_config(model_path)
    layout: LayoutSpec = plugins.load_object(backend.layout)(model_config, engine, device)
    return layout


def _check_writable(root_dir: Path) -> None:
    """Nothing is created yet: what counts is the nearest directory that exists."""
    nearest = next(path for path in (root_dir, *root_dir.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        msg = (
            f"checkpoint_engine.root_dir={root_dir}: {nearest} is no directory to write reports to"
        )
        raise ConfigError(msg)


def _check_perturbation(config: MiniRLConfig) -> None:
    if not config.checkpoint_engine.debug.verify_live_weights:
        raise ConfigError(f"{_PERTURB}: it proves nothing without {_LIVE}")
    name = config.actor.engine_config.backend
    backend = plugins.load_backend(plugins.TRAIN_ENGINES, name)
    if not issubclass(plugins.load_object(backend.engine), SupportsPerturbation):
        msg = f"{_PERTURB}: actor.engine_config.backend={name} cannot change and restore weights"
        raise ConfigError(msg)
