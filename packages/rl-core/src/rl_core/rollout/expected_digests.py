"""What each tensor-parallel rank of an engine must hold, derived from the trainer's tensors.

Runs where the trainer's tensors are. It knows the engine's layout from its spec alone and uses
nothing of the engine's loader. Tensors may pass in any order and are not kept: digests are summed
up block by block (`rl_core.torch.WordSum`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from rl_core.errors import ManifestMismatchError
from rl_core.layout import Constant, Frequencies, fill
from rl_core.metadata import ManifestCheck, TensorMeta
from rl_core.rollout.rank_plan import RankPlan, Spot, block
from rl_core.rollout.rotary import rotary_frequencies, rotary_table
from rl_core.torch import WordSum, as_bytes, content_digest, dtype_of, meta_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_core.interfaces import TensorStream
    from rl_core.layout import Buffer, LayoutSpec
    from rl_core.metadata import Manifest


class ExpectedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run-time tensor of one rank must be.

    Attributes:
        shape: its shape on the rank.
        dtype: its dtype there.
        digest: `wsum64`, bound to run-time name, shape and dtype.
        sources: Hugging Face tensors that it is made of; empty for buffers.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: str
    sources: tuple[str, ...] = ()


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank must hold.

    Attributes:
        tp_rank: the rank.
        tensors: by run-time name.
        unverifiable: why, by the name of what the table does not cover: a Hugging Face tensor, or
            a run-time tensor of which the manifest has only some parts.
    """

    tp_rank: int
    tensors: dict[str, ExpectedTensor]
    unverifiable: dict[str, str] = {}


class ExpectedDigests:
    """Watches one version pass and says what the ranks must hold after it."""

    def __init__(
        self, spec: LayoutSpec, manifest: Manifest, ranks: Sequence[int], tp_size: int
    ) -> None:
        """For some of the `tp_size` ranks of a replica."""
        self._check = ManifestCheck(manifest)
        self._spec = spec
        self._plans = [RankPlan(spec, manifest, rank, tp_size) for rank in ranks]
        self._sums: list[dict[str, WordSum]] = [{} for _ in ranks]

    def see(self, meta: TensorMeta, tensor: torch.Tensor) -> None:
        """Account for one tensor, which is not kept; ManifestMismatchError if it is foreign."""
        if tuple(tensor.shape) != meta.shape:
            msg = f"tensor {meta.name!r} is {tuple(tensor.shape)}, announced was {meta.shape}"
            raise ManifestMismatchError(msg)
        self._check.see(meta)
        for plan, sums in zip(self._plans, self._sums, strict=True):
            for spot in plan.spots.get(meta.name, ()):
                data = block(tensor, spot)
                offset = spot.offset * data.element_size()
                sums.setdefault(spot.parameter, WordSum()).add(offset, as_bytes(data))

    def finish(self) -> list[Expectation]:
        """What each of the ranks must hold; ManifestMismatchError if tensors never came."""
        self._check.close()
        buffers = dict(self._buffers())
        return [
            Expectation(
                plan.tp_rank,
                {**self._parameters(plan, sums), **buffers},
                {**plan.unverifiable},
            )
            for plan, sums in zip(self._plans, self._sums, strict=True)
        ]

    def _parameters(self, plan: RankPlan, sums: dict[str, WordSum]) -> dict[str, ExpectedTensor]:
        found = {}
        for name, held in plan.parameters.items():
            meta = TensorMeta(name, held.shape, held.dtype)
            digest = sums.get(name, WordSum()).digest(meta)
            found[name] = ExpectedTensor(held.shape, held.dtype, digest, held.sources)
        return found

    def _buffers(self) -> Iterator[tuple[str, ExpectedTensor]]:
        for row in self._spec.buffers:
            tensor = buffer_of(row)
            for name in names_of(row, self._spec.layers):
                meta = meta_of(name, tensor)
                digest = content_digest(meta, tensor, "wsum64")
                yield name, ExpectedTensor(meta.shape, meta.dtype, digest)


def expected_digests(
    weights: TensorStream,
    manifest: Manifest,
    spec: LayoutSpec,
    ranks: Sequence[int],
    tp_size: int,
) -> list[Expectation]:
    """What `ranks` of `tp_size` must hold once they have loaded all of `weights`.

    Args:
        weights: full tensors under their Hugging Face names, in any order, on any device.
        manifest: the version.
        spec: the engine's layout of this model.
        ranks: tensor-parallel ranks to compute.
        tp_size: ranks of the replica.

    Errors: ManifestMismatchError if the stream is not what the manifest says.
    """
    digests = ExpectedDigests(spec, manifest, ranks, tp_size)
    for meta, tensor in weights:
        digests.see(meta, tensor)
    return digests.finish()


def buffer_of(row: Buffer) -> torch.Tensor:
    """The tensor that a buffer's row describes, on the host."""
    if isinstance(row, Constant):
        return torch.full(row.shape, row.value, dtype=torch.float64).to(dtype_of(row.dtype))
    if isinstance(row, Frequencies):
        return rotary_frequencies(row.dim, row.base)
    return rotary_table(row).to(dtype_of(row.dtype))


def names_of(row: Buffer, layers: int) -> list[str]:
    """Run-time names of a buffer in all layers that have it."""
    wanted = getattr(row, "layers", None)
    names = [fill(row.name, {"layer": layer}) for layer in wanted or range(layers)]
    return list(dict.fromkeys(names))


def assemble(plan: RankPlan, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The run-time parameter `name` of the plan's rank, put together: to look at, or in tests.

    Args:
        plan: of the rank.
        name: run-time name.
        tensors: at least its sources, under their Hugging Face names.
    """
    held = plan.parameters[name]
    whole = torch.zeros(held.shape, dtype=dtype_of(held.dtype))
    flat = whole.view(-1)
    for source in held.sources:
        for spot in plan.spots[source]:
            if spot.parameter == name:
                data = block(tensors[source], spot).reshape(-1)
                flat[spot.offset : spot.offset + data.numel()] = data
    return whole


__all__ = [
    "Expectation",
    "ExpectedDigests",
    "ExpectedTensor",
    "Spot",
    "assemble",
    "buffer_of",
    "expected_digests",
    "names_of",
]
