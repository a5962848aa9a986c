"""What each tensor-parallel rank of an engine must hold, derived from the trainer's tensors.

Runs where the trainer's tensors are. It knows the engine's layout from its spec alone and uses
nothing of the engine's loader. Tensors may pass in any order and are not kept: digests are summed
up block by block (`rl_core.torch.WordSum`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.errors import ManifestMismatchError
from rl_core.layout import Constant, Frequencies, fill
from rl_core.metadata import ManifestCheck, TensorMeta
from rl_core.rollout.expectation import Expectation, ExpectedTensor
from rl_core.rollout.rank_plan import RankPlan, Spot, block
from rl_core.rollout.rotary import rotary_frequencies, rotary_table
from rl_core.torch import WordSum, as_bytes, content_digest, dtype_of, meta_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_core.interfaces import TensorStream
    from rl_core.layout import Buffer, LayoutSpec
    from rl_core.metadata import Manifest


class RankLayouts:
    """What some ranks hold of versions of one structure, whatever the values: made once.

    Attributes:
        plans: of the ranks, in the order given.
        buffers: what is the same on every rank and in every version, by run-time name.
    """

    def __init__(
        self, spec: LayoutSpec, manifest: Manifest, ranks: Sequence[int], tp_size: int
    ) -> None:
        """Of `ranks` out of the `tp_size` of a replica."""
        self.plans = [RankPlan(spec, manifest, rank, tp_size) for rank in ranks]
        self.buffers = dict(_buffers(spec))
        self._spec = spec
        self._structure = manifest.structure_hash

    def fit(self, manifest: Manifest) -> bool:
        """Whether they are those of `manifest`, too."""
        return manifest.structure_hash == self._structure

    def buffer(self, name: str) -> torch.Tensor:
        """One of `buffers`, put together."""
        rows = self._spec.buffers
        [row] = [row for row in rows if name in names_of(row, self._spec.layers)]
        return buffer_of(row)


class ExpectedDigests:
    """Watches one version pass and says what the ranks must hold after it."""

    def __init__(self, layouts: RankLayouts, manifest: Manifest) -> None:
        """For the ranks of `layouts`, which fit the manifest."""
        self._check = ManifestCheck(manifest)
        self._layouts = layouts
        self._sums: list[dict[str, WordSum]] = [{} for _ in layouts.plans]

    def see(self, meta: TensorMeta, tensor: torch.Tensor) -> None:
        """Account for one tensor, which is not kept; ManifestMismatchError if it is foreign."""
        if tuple(tensor.shape) != meta.shape:
            msg = f"tensor {meta.name!r} is {tuple(tensor.shape)}, announced was {meta.shape}"
            raise ManifestMismatchError(msg)
        self._check.see(meta)
        for plan, sums in zip(self._layouts.plans, self._sums, strict=True):
            for spot in plan.spots.get(meta.name, ()):
                data = block(tensor, spot)
                offset = spot.offset * data.element_size()
                sums.setdefault(spot.parameter, WordSum()).add(offset, as_bytes(data))

    def finish(self) -> list[Expectation]:
        """What each of the ranks must hold; ManifestMismatchError if tensors never came."""
        self._check.close()
        return [
            Expectation(
                plan.tp_rank,
                {**self._parameters(plan, sums), **self._layouts.buffers},
                {**plan.unverifiable},
            )
            for plan, sums in zip(self._layouts.plans, self._sums, strict=True)
        ]

    def _parameters(self, plan: RankPlan, sums: dict[str, WordSum]) -> dict[str, ExpectedTensor]:
        found = {}
        for name, held in plan.parameters.items():
            meta = TensorMeta(name, held.shape, held.dtype)
            digest = sums.get(name, WordSum()).digest(meta)
            found[name] = ExpectedTensor(held.shape, held.dtype, digest, held.sources, held.slices)
        return found


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
    digests = ExpectedDigests(RankLayouts(spec, manifest, ranks, tp_size), manifest)
    for meta, tensor in weights:
        digests.see(meta, tensor)
    return digests.finish()


def _buffers(spec: LayoutSpec) -> Iterator[tuple[str, ExpectedTensor]]:
    for row in spec.buffers:
        tensor = buffer_of(row)
        for name in names_of(row, spec.layers):
            meta = meta_of(name, tensor)
            digest = content_digest(meta, tensor, "wsum64")
            yield name, ExpectedTensor(meta.shape, meta.dtype, digest)


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
    "RankLayouts",
    "Spot",
    "assemble",
    "buffer_of",
    "expected_digests",
    "names_of",
]
