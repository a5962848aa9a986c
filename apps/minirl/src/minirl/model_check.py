"""What of a model's directory contradicts the configuration, seen without loading it."""

import json
from pathlib import Path
from typing import Any

from minirl.config import MiniRLConfig
from rl_core.errors import ConfigError

_KEY = "actor.model_config.local_path"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


_SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


def check_model(path: Path, config: MiniRLConfig) -> None:
    """ConfigError if the model cannot be trained or served as the configuration says."""
    model = read_model_config(path)
    _check_kind(model, path)
    _check_length(model, config)
    _check_heads(model, config.rollout.tensor_model_parallel_size)


def check_same_model(trained: Path, served: Path) -> None:
    """ConfigError if the weights of one directory's model cannot be loaded into the other's."""
    key = "rollout.local_path"
    mine, theirs = read_model_config(trained), read_model_config(served, key)
    for name in _SIZES:
        if mine.get(name) != theirs.get(name):
            msg = (
                f"{key}={served}: {name} is {theirs.get(name)}, the model that is trained has "
                f"{mine.get(name)}; leave {key} out, or give a directory of the same model"
            )
            raise ConfigError(msg)


def read_model_config(path: Path, key: str = _KEY) -> dict[str, Any]:
    """The parsed `config.json` of the directory that `key` names; ConfigError if it has none."""
    try:
        model = json.loads((path / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}={path}: config.json cannot be read: {error}") from error
    if not isinstance(model, dict):
        raise ConfigError(f"{key}={path}: config.json holds no mapping")
    return model


def _check_kind(model: dict[str, Any], path: Path) -> None:
    names = model.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{_KEY}={path}: architectures in config.json is no list of names")
    if names and not any("CausalLM" in name or "LMHead" in name for name in names):
        msg = f"{_KEY}={path}: {', '.join(names)} is no causal language model"
        raise ConfigError(msg)
    if not any((path / name).exists() for name in _TOKENIZERS):
        msg = f"{_KEY}={path}: no tokenizer there ({', '.join(_TOKENIZERS)})"
        raise ConfigError(msg)


def _check_length(model: dict[str, Any], config: MiniRLConfig) -> None:
    limit = model.get("max_position_embeddings")
    prompt, completion = config.data.max_prompt_length, config.rollout.max_completion_length
    if isinstance(limit, int) and prompt + completion > limit:
        msg = (
            f"data.max_prompt_length={prompt} and rollout.max_completion_length={completion}: the "
            f"model attends to {limit} tokens"
        )
        raise ConfigError(msg)


def _check_heads(model: dict[str, Any], tp_size: int) -> None:
    heads = model.get("num_attention_heads")
    kv_heads = model.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return
    # Fewer key-value heads than ranks are replicated, more are split.
    if heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads):
        msg = (
            f"rollout.tensor_model_parallel_size={tp_size}: it must divide the model's {heads} "
            f"heads, and divide or be a multiple of its {kv_heads} key-value heads"
        )
        raise ConfigError(msg)
