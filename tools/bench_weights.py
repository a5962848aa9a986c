"""The weights that the transfer benchmark moves: bfloat16 tensors of given sizes, random bytes."""

from collections.abc import Callable, Iterator

import torch

from rl_core.metadata import Manifest, TensorMeta
from rl_core.torch import from_bytes
from rl_core.versions import PolicyVersion

RUN_ID = "bench"
HIDDEN, KEY_VALUE, INNER, VOCABULARY = 2048, 512, 5632, 32000


def realistic(megabytes: int, bucket_megabytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A decoder of TinyLlama's shapes with as many layers as fit; the rest pads the embedding."""
    del bucket_megabytes
    layer = {
        "input_layernorm": (HIDDEN,),
        "q_proj": (HIDDEN, HIDDEN),
        "k_proj": (KEY_VALUE, HIDDEN),
        "v_proj": (KEY_VALUE, HIDDEN),
        "o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN),
        "down_proj": (HIDDEN, INNER),
    }
    elements = sum(rows * (columns[0] if columns else 1) for rows, *columns in layer.values())
    total = megabytes * (1 << 19)
    layers = max(0, total - VOCABULARY * HIDDEN) // elements
    rows, rest = divmod(total - layers * elements, HIDDEN)
    yield "model.embed_tokens.weight", (rows, HIDDEN)
    for number in range(layers):
        for name, shape in layer.items():
            yield f"model.layers.{number}.{name}.weight", shape
    if rest:
        yield "model.norm.weight", (rest,)


def large(megabytes: int, bucket_megabytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of half a bucket."""
    size = max(1, min(bucket_megabytes // 2, megabytes))
    for number in range(megabytes // size):
        yield f"large.{number}", (size << 19,)


SHAPES: dict[str, Callable[[int, int], Iterator[tuple[str, tuple[int, ...]]]]] = {
    "realistic": realistic,
    "large": large,
}
"""Sets of tensors, by name."""


class Weights:
    """One set of tensors in one block of memory.

    Attributes:
        metas: names, shapes, dtypes, in order.
        data: the block, flat uint8.
    """

    def __init__(self, shape: str, data: torch.Tensor, bucket_megabytes: int) -> None:
        megabytes = data.numel() >> 20
        self.metas = [
            TensorMeta(name, size, "bfloat16")
            for name, size in SHAPES[shape](megabytes, bucket_megabytes)
        ]
        self.data = data

    def manifest(self, step: int) -> Manifest:
        """What is announced."""
        return Manifest(PolicyVersion(1, step), tuple(self.metas), RUN_ID)

    def __iter__(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        start = 0
        for meta in self.metas:
            yield meta, from_bytes(self.data[start : start + meta.nbytes], meta)
            start += meta.nbytes
