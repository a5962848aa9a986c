"""How much memory the keys and values of a sequence take, as far as `config.json` tells."""

from collections.abc import Mapping
from typing import Any

from rl_core.metadata import DTYPE_BYTES


def bytes_per_token(model: Mapping[str, Any], dtype: str, tp_size: int) -> int:
    """Bytes that one token takes on each engine rank.

    Args:
        model: what `config.json` says of the text model.
        dtype: of keys and values.
        tp_size: ranks, which share the heads.

    Errors: KeyError naming a size that `config.json` lacks.
    """
    heads = model.get("num_key_value_heads") or model["num_attention_heads"]
    width = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    per_rank = max(1, heads // tp_size)
    return int(2 * model["num_hidden_layers"] * per_rank * width * DTYPE_BYTES[dtype])


def every_token_is_kept(model: Mapping[str, Any]) -> bool:
    """Whether each layer keeps the plain keys and values of all tokens."""
    layers = set(model.get("layer_types") or ())
    return not (model.get("kv_lora_rank") or model.get("sliding_window")) and layers <= {
        "full_attention"
    }
