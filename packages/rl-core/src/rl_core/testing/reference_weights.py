"""Sizes and weights of the reference engine's model, under Hugging Face names."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rl_core.errors import ConfigError
from rl_core.testing.weight_set import WeightSet

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
INV_FREQ = "model.rotary_emb.inv_freq"
SCALE = "model.logit_scale"
EOS = 0
"""Token id that ends a completion of the reference engine."""


@dataclass(frozen=True)
class ReferenceModelConfig:
    """Sizes of the reference model: a decoder with rotary positions and a gated MLP."""

    vocab: int = 32
    """Tokens; id 0 ends a sequence."""
    hidden: int = 16
    """Width; a multiple of 2 * heads."""
    layers: int = 2
    """Decoder layers."""
    heads: int = 2
    """Attention heads; a multiple of the tensor-parallel size."""
    intermediate: int = 24
    """Width of the MLP; a multiple of the tensor-parallel size."""
    tied: bool = True
    """Whether the head shares the embedding's storage."""

    def __post_init__(self) -> None:
        if self.hidden % (2 * self.heads):
            msg = f"hidden={self.hidden} is not a multiple of 2 * heads={2 * self.heads}"
            raise ConfigError(msg)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


def make_weights(config: ReferenceModelConfig, seed: int) -> WeightSet:
    """Random weights of the reference model, on which every token depends; float32."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight") or name == SCALE:
            tensors[name] = 1.0 + 0.2 * noise
        elif name == INV_FREQ:
            tensors[name] = 0.2 + noise.abs()
        else:
            tensors[name] = 0.4 * noise
    return WeightSet(tensors, {EMBEDDING: (HEAD,)} if config.tied else {})


def shapes(config: ReferenceModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and full shapes of every tensor, in stream order."""
    hidden, wide = config.hidden, config.intermediate
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab, hidden)}
    for layer in range(config.layers):
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(hidden, wide)}
    found |= {"model.norm.weight": (hidden,), INV_FREQ: (config.head_dim // 2,), SCALE: ()}
    return found if config.tied else {**found, HEAD: (config.vocab, hidden)}


def _layer(hidden: int, wide: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "input_layernorm.weight", (hidden,)
    for part in "qkvo":
        yield f"self_attn.{part}_proj.weight", (hidden, hidden)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (wide, hidden)
    yield "mlp.up_proj.weight", (wide, hidden)
    yield "mlp.down_proj.weight", (hidden, wide)
