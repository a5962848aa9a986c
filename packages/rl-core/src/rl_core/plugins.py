"""Finding backends by entry point, and building their configuration.

Groups: `minirl.train_engines`, `minirl.checkpoint_engines`, `minirl.rollout_backends`. Loading an
entry must not import an engine: its heavy parts are `module:Class` strings (`load_object`).
"""

import dataclasses
import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, cast, get_type_hints

import msgspec

from rl_core.errors import (
    ComponentLoadError,
    ComponentNotFoundError,
    ConfigError,
    IncompatibleVersionError,
)
from rl_core.interfaces import API_VERSION
from rl_core.metadata import nearest

TRAIN_ENGINES = "minirl.train_engines"
CHECKPOINT_ENGINES = "minirl.checkpoint_engines"
ROLLOUT_BACKENDS = "minirl.rollout_backends"

KNOWN_PROVIDERS: Mapping[tuple[str, str], str] = {
    (TRAIN_ENGINES, "fsdp2"): "rl-train-fsdp",
    (CHECKPOINT_ENGINES, "hccl"): "rl-ckpt-hccl",
    (CHECKPOINT_ENGINES, "mooncake"): "rl-ckpt-mooncake",
    (CHECKPOINT_ENGINES, "disk"): "rl-ckpt-disk",
    (ROLLOUT_BACKENDS, "vllm"): "rl-rollout-vllm",
    (ROLLOUT_BACKENDS, "sglang"): "rl-rollout-sglang",
}
"""Distributions that provide the names we know of, for the install hint."""

Config = TypeVar("Config")


def installed(group: str) -> list[str]:
    """Names available in an entry-point group, sorted."""
    return sorted({entry.name for entry in entry_points(group=group)})


def load_backend(group: str, name: str) -> Any:
    """The object that the installed provider of `name` announces.

    Errors: ComponentNotFoundError says what to install, ComponentLoadError that importing it
    failed or that two distributions claim the name, IncompatibleVersionError that it was written
    for other interfaces.
    """
    found = [entry for entry in entry_points(group=group) if entry.name == name]
    if not found:
        raise ComponentNotFoundError(_not_found(group, name))
    if len({entry.value for entry in found}) > 1:
        values = ", ".join(f"{_origin(entry)} ({entry.value})" for entry in found)
        raise ComponentLoadError(f"two distributions provide {name!r} in {group}: {values}")
    try:
        backend = found[0].load()
    except Exception as error:
        msg = f"{name!r} of {group} ({_origin(found[0])}) could not be loaded: {error}"
        raise ComponentLoadError(msg) from error
    version = getattr(backend, "api_version", None)
    if version != API_VERSION:
        msg = (
            f"{name!r} of {group} ({_origin(found[0])}) was written for interface version "
            f"{version}, this rl-core has {API_VERSION}; install versions that belong together"
        )
        raise IncompatibleVersionError(msg)
    return backend


def load_object(path: str) -> Any:
    """The object named by `module:attribute`; ComponentLoadError if importing it fails."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ComponentLoadError(f"cannot load {path!r}: {error}") from error


def load_configured(group: str, name: str, values: Mapping[str, Any], where: str) -> Any:
    """The installed backend `name` and its configuration, as a pair; errors of the two parts."""
    backend = load_backend(group, name)
    return backend, build_config(load_object(backend.config_cls), values, where)


def build_config(cls: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """A dataclass from plain values; ConfigError names an unknown key or a wrong type.

    Sections (fields that are dataclasses themselves) are checked alike.

    Args:
        cls: dataclass whose annotations are checked strictly.
        values: plain data (dicts, lists, numbers, text).
        where: prefix of the keys in messages, such as `checkpoint_engine.options`.
    """
    _check_keys(cls, values, where)
    try:
        return msgspec.convert(dict(values), type=cls, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_keys(cls: type[Any], values: Mapping[str, Any], where: str) -> None:
    """ConfigError for the first unknown key, in sections (nested dataclasses) too."""
    known = [item.name for item in dataclasses.fields(cls) if item.init]
    types = get_type_hints(cls)
    for key, value in values.items():
        if key not in known:
            hint = nearest(key, known)
            msg = f"unknown key {where}.{key}" + (f"; did you mean {where}.{hint}?" if hint else "")
            raise ConfigError(msg)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(types[key]):
            _check_keys(cast("type[Any]", types[key]), value, f"{where}.{key}")


def _not_found(group: str, name: str) -> str:
    provider = KNOWN_PROVIDERS.get((group, name))
    names = installed(group)
    available = ", ".join(names) if names else "none"
    if provider is not None:
        return f"{name!r} is not installed: pip install {provider} (installed: {available})"
    kind = group.partition(".")[2]
    hint = nearest(name, names)
    return (
        f"no {kind} named {name!r}; installed: {available}"
        + (f"; the nearest is {hint!r}" if hint else "")
        + f"; to add one, install the distribution with an entry point {name!r} in {group}"
    )


def _origin(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown distribution"
