"""Settings that a resumed run shares with the one that wrote the checkpoint.

They are those which decide what is sampled and how it is learned from. Where and how fast that is
done may change: devices, number of ranks, rollout backend, transport, micro-batches, timeouts; so
may the reward function (a bug in it may be why the run has to be resumed), and
`trainer.total_training_steps`, which may grow.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from minirl.config import MiniRLConfig
from minirl.config_keys import value_of
from minirl.run_state import RunState
from rl_core.errors import ConfigError

_SECTIONS = ("actor.optimizer_config", "algorithm", "data")
_KEYS = (
    "actor.engine_config.dtype",
    "rollout.dtype",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.max_completion_length",
    "trainer.seed",
    "trainer.sync_freq",
)
_BY_CONTENT = ("data.path", "data.eval_path", "data.eval_size")
"""Of these only the prompts matter that come of them: `PromptLoader.load_state` compares those."""

_RECOGNISED_BY = ("config.json", "tokenizer.json", "tokenizer_config.json")
_HEADER_SIZE = 8
_PARTS, _PART_SIZE = 256, 4096
"""Of each file, for `reference_digest`."""


def shared_settings(config: MiniRLConfig) -> dict[str, Any]:
    """Their values by key, as they are written to a checkpoint."""
    found = {key: value_of(config, key) for key in _KEYS}
    for section in _SECTIONS:
        for name, value in asdict(value_of(config, section)).items():
            key = f"{section}.{name}"
            if key not in _BY_CONTENT:
                found[key] = value
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))
    return plain


def model_digest(directory: Path) -> str:
    """What a model directory is recognised by, wherever it lies: architecture and tokenizer.

    Weights are not read; a resumed run takes them from the checkpoint. Those of a reference it
    does not: `reference_digest`.
    """
    state = xxhash.xxh3_128()
    for name in _RECOGNISED_BY:
        if (directory / name).is_file():
            state.update((directory / name).read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_HEADER_SIZE), "little")
            state.update(file.read(min(length, path.stat().st_size)))  # it may be damaged
    return state.hexdigest()


def reference_digest(config: MiniRLConfig, model: Path) -> str:
    """What the reference's weights are recognised by; empty without a term that needs one.

    A sample of every file: training moves all weights, and a large model need not be read whole.
    """
    if config.algorithm.kl_coef == 0:
        return ""
    state = xxhash.xxh3_128()
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            for part in range(_PARTS):
                file.seek(size * part // _PARTS)
                state.update(file.read(_PART_SIZE))
    return state.hexdigest()


def check_settings(state: RunState, config: MiniRLConfig, model: Path, checkpoint: Path) -> None:
    """ConfigError naming the first setting that contradicts the checkpoint."""
    if model_digest(model) != state.model_digest:
        msg = (
            f"actor.model_config.local_path={model}: {checkpoint} is of another model, "
            f"{state.model}"
        )
        raise ConfigError(msg)
    key = _first_difference(state.settings, shared_settings(config))
    if key is not None:
        msg = (
            f"{key}={value_of(config, key)}: {checkpoint} was written with "
            f"{key}={state.settings[key]}; give the same, or begin a new run"
        )
        raise ConfigError(msg)
    if state.reference_digest and state.reference_digest != reference_digest(config, model):
        msg = (
            f"actor.model_config.local_path={model}: {checkpoint} was trained beside a reference "
            "(algorithm.kl_coef) of other weights than are there now"
        )
        raise ConfigError(msg)
    total = config.trainer.total_training_steps
    if total < state.step:
        msg = (
            f"trainer.total_training_steps={total}: {checkpoint} has {state.step} steps behind "
            "it; the number may grow, not shrink"
        )
        raise ConfigError(msg)


def _first_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Keys that only one of them has were not there, or no longer are, in the other's version."""
    return next((key for key in old if key in new and old[key] != new[key]), None)
