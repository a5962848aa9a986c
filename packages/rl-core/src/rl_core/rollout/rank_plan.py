"""Where each tensor of a manifest goes in one tensor-parallel rank, from the layout spec alone."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_core.layout import Change, Part, fill, match, placeholders
from rl_core.torch import dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_core.layout import LayoutSpec, Parameter
    from rl_core.metadata import Manifest

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Share:
    """What a rank takes of a tensor.

    Attributes:
        dim: dimension that is cut.
        start: first index that is taken.
        count: how many are taken.
        length: how many there are on the rank; the rest is zeros.
    """

    dim: int
    start: int
    count: int
    length: int

    def of(self, source: str, shape: Shape) -> str:
        """Which part of the tensor `source`, as one writes it in an index."""
        if not shape or (self.start, self.count) == (0, shape[self.dim]):
            return source
        return f"{source}[{':, ' * self.dim}{self.start}:{self.start + self.count}]"


@dataclass(frozen=True)
class Spot:
    """A block of a run-time parameter that one Hugging Face tensor fills; it is contiguous there.

    Attributes:
        parameter: run-time name.
        offset: first element of the block, in the flattened parameter.
        share: what of the tensor is in it.
        dtype: dtype of the parameter.
        change: what happens to the values.
    """

    parameter: str
    offset: int
    share: Share
    dtype: str
    change: Change


class Held(NamedTuple):
    """A run-time parameter of the rank; `slices` says what it takes of each part, in order."""

    shape: Shape
    dtype: str
    sources: tuple[str, ...]
    slices: tuple[str, ...] = ()


class Misfit(Exception):  # noqa: N818 - never leaves this module
    """A parameter that cannot be derived; the text says why."""


class RankPlan:
    """The parameters of one rank, and what of each tensor goes where.

    Attributes:
        tp_rank: the rank.
        parameters: by run-time name.
        spots: by Hugging Face name of the tensor that travels.
        unverifiable: why, by name.
    """

    def __init__(self, spec: LayoutSpec, manifest: Manifest, tp_rank: int, tp_size: int) -> None:
        self.tp_rank = tp_rank
        self.parameters: dict[str, Held] = {}
        self.spots: dict[str, list[Spot]] = defaultdict(list)
        self.unverifiable: dict[str, str] = {}
        self._spec = spec
        self._size = tp_size
        self._shapes = {meta.name: meta.shape for meta in manifest.tensors}
        plain = {
            name: meta.name
            for meta in manifest.tensors
            if meta.target == "policy" and not meta.quantisation
            for name in (meta.name, *meta.aliases)
        }
        used: set[str] = set()
        for row in spec.parameters:
            for name, sources in _instances(row, plain).items():
                used.update(sources.values())
                self._place(row, name, sources)
        for meta in manifest.tensors:
            unused = any(match(pattern, meta.name) is not None for pattern in spec.unused)
            if meta.name not in used and not unused:
                self.unverifiable[meta.name] = _why(meta.target, meta.quantisation, spec)

    def _place(self, row: Parameter, name: str, sources: dict[tuple[int, int], str]) -> None:
        dtype = row.dtype or self._spec.dtype
        try:
            shape, spots = self._laid_out(row, sources)
        except Misfit as error:
            self.unverifiable[name] = str(error)
            return
        for source, offset, share in spots:
            self.spots[source].append(Spot(name, offset, share, dtype, row.change))
        slices = tuple(share.of(source, self._shapes[source]) for source, _, share in spots)
        taken = {source for source, _, share in spots if share.count}
        used = tuple(source for source in dict.fromkeys(sources.values()) if source in taken)
        self.parameters[name] = Held(shape, dtype, used, slices)

    def _laid_out(
        self, row: Parameter, sources: dict[tuple[int, int], str]
    ) -> tuple[Shape, list[tuple[str, int, Share]]]:
        """Shape of a parameter, and its blocks: source, first element, share."""
        copies = 1 + max(copy for copy, _ in sources)
        offset, blocks, shapes = 0, [], []
        for copy in range(copies):
            shape: Shape | None = None
            for number, part in enumerate(row.parts):
                source = sources.get((copy, number))
                if source is None:
                    raise Misfit(
                        f"the manifest lacks a part of it: {_absent(row, sources, copy, part)}"
                    )
                share = self._share(part, self._shapes[source], row.pad)
                mine = _with(self._shapes[source], share)
                blocks.append((source, offset, share))
                offset += math.prod(mine)
                shape = _below(shape, mine, source)
            shapes.append(shape)
        if len(set(shapes)) > 1:
            raise Misfit(f"its entries differ in shape: {sorted(set(map(str, shapes)))}")
        one = shapes[0] or ()
        return ((copies, *one) if _stacked(row) else one), blocks

    def _share(self, part: Part, shape: Shape, pad: int) -> Share:
        if part.cut == "whole" or not shape:
            return Share(0, 0, shape[0] if shape else 1, shape[0] if shape else 1)
        dim = len(shape) - 1 if part.cut == "columns" else 0
        size, rank = shape[dim], self.tp_rank
        if part.cut == "vocabulary":
            return self._vocabulary(size, pad)
        pieces = self._size
        if part.cut == "kv_heads" and self._spec.kv_heads < self._size:
            pieces = self._spec.kv_heads
            if self._size % pieces:
                raise Misfit(f"{pieces} key-value heads do not go into {self._size} ranks")
            rank //= self._size // pieces
        if size % pieces:
            raise Misfit(f"{part.source}: {size} is not divisible by {pieces}")
        count = size // pieces
        return Share(dim, rank * count, count, -(-count // pad) * pad)

    def _vocabulary(self, size: int, pad: int) -> Share:
        padded = -(-size // pad) * pad
        if padded % self._size:
            pad *= self._size
            padded = -(-size // pad) * pad
        length = padded // self._size
        start = min(size, self.tp_rank * length)
        return Share(0, start, min(size, start + length) - start, length)


def block(tensor: torch.Tensor, spot: Spot) -> torch.Tensor:
    """What `spot` holds of its source tensor, contiguous, in the parameter's dtype."""
    share = spot.share
    taken = tensor.detach()
    if taken.dim():
        taken = taken.narrow(share.dim, share.start, share.count)
    taken = taken.to(dtype_of(spot.dtype))
    if spot.change == "plus_one":
        taken = taken + 1
    elif spot.change == "unsigned_zeros":
        taken = taken + 0.0
    if share.length > share.count:
        room = [0, 0] * (taken.dim() - 1 - share.dim) + [0, share.length - share.count]
        taken = torch.nn.functional.pad(taken, room)
    return taken.contiguous()


def _instances(row: Parameter, names: dict[str, str]) -> dict[str, dict[tuple[int, int], str]]:
    """Sources of every parameter that a row describes, by (number in the stack, part).

    Args:
        row: of the table.
        names: by every name that a tensor has, the one that it travels under.
    """
    found: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for source, number, numbers in _matches(row, names):
        inside = placeholders(row.name)
        outer = {key: value for key, value in numbers.items() if key in inside}
        [copy] = [value for key, value in numbers.items() if key not in inside] or [0]
        found[fill(row.name, outer)][copy, number] = source
    return found


def _matches(row: Parameter, names: dict[str, str]) -> Iterator[tuple[str, int, dict[str, int]]]:
    for number, part in enumerate(row.parts):
        for name, travels_as in names.items():
            numbers = match(part.source, name)
            if numbers is not None:
                yield travels_as, number, numbers


def _stacked(row: Parameter) -> bool:
    return any(placeholders(part.source) - placeholders(row.name) for part in row.parts)


def _absent(row: Parameter, sources: dict[tuple[int, int], str], copy: int, part: Part) -> str:
    """Name of the tensor that should be part `part` of entry `copy` of the stack."""
    (_, number), known = next(iter(sources.items()))
    numbers = match(row.parts[number].source, known) or {}  # {}: it travels under an alias
    inside = placeholders(row.name)
    return fill(part.source, {key: n if key in inside else copy for key, n in numbers.items()})


def _with(shape: Shape, share: Share) -> Shape:
    if not shape:
        return shape
    return (*shape[: share.dim], share.length, *shape[share.dim + 1 :])


def _below(above: Shape | None, mine: Shape, source: str) -> Shape:
    if above is None:
        return mine
    if above[1:] != mine[1:]:
        raise Misfit(f"{source} is {mine} and does not fit under {above}")
    return (above[0] + mine[0], *above[1:])


def _why(target: str, quantisation: str | None, spec: LayoutSpec) -> str:
    if target != "policy":
        return f"it belongs to the {target} model"
    if quantisation:
        return f"it is quantised ({quantisation})"
    return f"the layout of {spec.family} in {spec.engine} has no row for it"
