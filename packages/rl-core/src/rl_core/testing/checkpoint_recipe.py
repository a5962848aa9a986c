"""Weights described by a few words, so that every process of a test makes the same ones.

A recipe is small and picklable; the tensors are made where they are needed, one at a time, and
their expected digests in the test. Contents are random bytes: every bit pattern travels, NaN
payloads and signed zeros included.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

import torch

from rl_core import digests
from rl_core.metadata import DTYPE_BYTES, Manifest, TensorMeta
from rl_core.torch import content_digest, dtype_of, from_bytes
from rl_core.versions import PolicyVersion

RUN_ID = "contract"

Layout = Literal["contiguous", "transposed", "strided", "shifted"]

POISON = 0xFF
"""Byte that overwrites a tensor as soon as the stream goes on, as a gather buffer would."""


class WeightSource(Protocol):
    """Weights that a sender's process makes, or finds, by itself; small and picklable."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes in which any one of the tensors can be made."""

    def scratch(self) -> torch.Tensor:
        """Memory in which any one of the tensors can be made: flat uint8."""

    def stream(self, scratch: torch.Tensor) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """The tensors, each overwritten with `POISON` when the next one is asked for."""

    def manifest(self, version: PolicyVersion, run_id: str = RUN_ID) -> Manifest:
        """What is announced when these weights are sent as `version`."""


@dataclass(frozen=True)
class TensorRecipe:
    """One tensor.

    Attributes:
        name: its Hugging Face name.
        shape: full shape.
        dtype: wire name of its dtype.
        layout: how it lies in memory: `contiguous`, `transposed` (dimensions reversed), `strided`
            (every other element) or `shifted` (starts one element into its storage).
        aliases: tied names.
        source_dtype: dtype at the trainer, where a cast is to be reported.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: Layout = "contiguous"
    aliases: tuple[str, ...] = ()
    source_dtype: str | None = None

    @property
    def meta(self) -> TensorMeta:
        """Its metadata."""
        return TensorMeta(
            self.name, self.shape, self.dtype, source_dtype=self.source_dtype, aliases=self.aliases
        )

    @property
    def storage_bytes(self) -> int:
        """Bytes of memory that `fill` needs."""
        elements = math.prod(self.shape)
        if self.layout == "strided":
            elements *= 2
        elif self.layout == "shifted":
            elements += 1
        return elements * DTYPE_BYTES[self.dtype]

    def fill(self, storage: torch.Tensor, seed: int) -> torch.Tensor:
        """The tensor, made in the first `storage_bytes` of flat uint8 `storage`.

        Args:
            storage: at least `padded(storage_bytes)` long.
            seed: of the weights; the name is mixed in.
        """
        words = storage[: padded(self.storage_bytes)].view(torch.int64)
        name_seed = digests.xxh3_128(self.meta).rpartition(":")[2][:15]
        generator = torch.Generator().manual_seed(int(name_seed, 16) ^ seed)
        words.random_(-(2**63), 2**63 - 1, generator=generator)
        raw = storage[: self.storage_bytes]
        if self.dtype == "bool":
            raw &= 1
        return self._shaped(raw.view(dtype_of(self.dtype)))

    def _shaped(self, flat: torch.Tensor) -> torch.Tensor:
        if self.layout == "transposed":
            dimensions = tuple(reversed(range(len(self.shape))))
            return flat.view(tuple(reversed(self.shape))).permute(dimensions)
        if self.layout == "strided":
            flat = flat[::2]
            return flat.as_strided(self.shape, [2 * step for step in _strides(self.shape)])
        if self.layout == "shifted":
            return flat[1:].view(self.shape)
        return flat.view(self.shape)


@dataclass(frozen=True)
class WeightRecipe:
    """A whole set of weights.

    Attributes:
        tensors: in stream order.
        seed: other seeds give other contents of the same structure.
    """

    tensors: tuple[TensorRecipe, ...]
    seed: int = 0

    def manifest(self, version: PolicyVersion, run_id: str = RUN_ID) -> Manifest:
        """What is announced when these weights are sent as `version`."""
        return Manifest(version, tuple(tensor.meta for tensor in self.tensors), run_id)

    def reseeded(self, seed: int) -> "WeightRecipe":
        """The same structure with other contents."""
        return replace(self, seed=seed)

    @property
    def scratch_bytes(self) -> int:
        """Bytes in which any one of the tensors can be made."""
        return max((padded(tensor.storage_bytes) for tensor in self.tensors), default=8)

    def scratch(self) -> torch.Tensor:
        """Memory in which any one of the tensors can be made."""
        return torch.empty(self.scratch_bytes, dtype=torch.uint8)

    def stream(self, scratch: torch.Tensor) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """The tensors, each overwritten with `POISON` when the next one is asked for."""
        for recipe in self.tensors:
            yield recipe.meta, recipe.fill(scratch, self.seed)
            scratch[: padded(recipe.storage_bytes)].fill_(POISON)

    def content_digests(self, kind: str = digests.XXH3_128) -> Mapping[str, str]:
        """Expected content digest of every tensor."""
        return _expected(self, kind)

    def weights_digest(self, kind: str = digests.XXH3_128) -> str:
        """Expected digest of digests."""
        return digests.digest_of_digests(self.content_digests(kind))


def padded(nbytes: int) -> int:
    """`nbytes` up to whole 64-bit words, at least one."""
    return max(8, -(-nbytes // 8) * 8)


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


@lru_cache(maxsize=256)
def _expected(weights: WeightRecipe, kind: str) -> Mapping[str, str]:
    scratch, row_major = weights.scratch(), {}
    for meta, tensor in weights.stream(scratch):
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        row_major[meta.name] = content_digest(meta, from_bytes(data, meta), kind)
    return row_major
