"""Layout specs: where Hugging Face tensors are in an engine's run-time parameters. Data, not code.

A spec is a table: one row for each run-time parameter (`Parameter`) or buffer (`Constant`,
`Rotary`, `Frequencies`) of a model family in one engine. Names are patterns: `{layer}` and
`{expert}` stand for a number. A new family is a new table; what reads it, such as
`rl_core.rollout.expected_digests`, does not change.
"""

import re
from functools import cache
from typing import Literal, TypeAlias

import msgspec

Cut: TypeAlias = Literal["whole", "rows", "columns", "kv_heads", "vocabulary"]
"""What a tensor-parallel rank takes of a tensor.

* `whole`: all of it;
* `rows`, `columns`: its equal share of the first or the last dimension;
* `kv_heads`: its share of the first dimension, which is made of key-value heads; where there are
  fewer heads than ranks, each head is on several ranks;
* `vocabulary`: its share of the first dimension after that was filled up with zeros to a multiple
  of `pad` (of `pad` times the ranks, where the ranks do not divide that).
"""

Change: TypeAlias = Literal["none", "plus_one", "unsigned_zeros"]
"""What the engine does to the values, after the conversion to its dtype.

* `plus_one`: adds 1 (a precomputed factor of Gemma's norms);
* `unsigned_zeros`: -0.0 counts as 0.0 (what is read back out of a packed kernel has lost it).
"""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One Hugging Face tensor of a run-time parameter.

    Attributes:
        source: pattern of its name.
        cut: what a rank takes of it.
    """

    source: str
    cut: Cut = "whole"


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run-time parameter: its parts below each other (dimension 0), cut first.

    A placeholder that is in the sources and not in the name is stacked over: the parameter has a
    new first dimension, of as many entries as there are numbers.

    Attributes:
        name: pattern of its run-time name.
        parts: what it is made of, in order.
        pad: the dimension that is cut is filled up with zeros to a multiple of this: of a
            vocabulary before it is cut, of anything else on each rank and in each part.
        change: what happens to the values.
        dtype: run-time dtype, where it is not the engine's.
    """

    name: str
    parts: tuple[Part, ...]
    pad: int = 1
    change: Change = "none"
    dtype: str | None = None


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A buffer with one and the same value everywhere, on every rank.

    Attributes:
        name: pattern of its run-time name.
        value: of every element.
        shape: its shape.
        dtype: its dtype.
    """

    name: str
    value: float
    shape: tuple[int, ...]
    dtype: str


class Rotary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A table of rotary positions, (positions, dim): cosines on the left, sines on the right.

    Attributes:
        name: pattern of its run-time name.
        dim: rotated elements of a head.
        positions: rows.
        base: `rope_theta`.
        dtype: run-time dtype; it is computed in float32.
        layers: the layers that have this one; None: all.
    """

    name: str
    dim: int
    positions: int
    base: float
    dtype: str
    layers: tuple[int, ...] | None = None


class Frequencies(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The rotary frequencies alone, (dim / 2,), float32, where the engine keeps no table.

    Attributes:
        name: pattern of its run-time name.
        dim: rotated elements of a head.
        base: `rope_theta`.
    """

    name: str
    dim: int
    base: float


Buffer: TypeAlias = Constant | Rotary | Frequencies


class LayoutSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one engine lays out one model.

    Attributes:
        engine: name of the rollout backend.
        family: the architecture, as `config.json` names it.
        device: device that the table is for.
        dtype: the engine's dtype.
        layers: decoder layers.
        kv_heads: key-value heads of the whole model.
        parameters: rows of what is made of Hugging Face tensors.
        buffers: rows of what is not.
        unused: patterns of Hugging Face names that the engine does not use (a head in the
            checkpoint of a model whose head is tied).
        unknown: patterns of run-time names that are known to be there and cannot be derived.
    """

    engine: str
    family: str
    device: str
    dtype: str
    layers: int
    kv_heads: int
    parameters: tuple[Parameter, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    unused: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        """Whether a row of the table says what the run-time tensor `name` holds."""
        held = any(match(row.name, name) is not None for row in self.parameters)
        return held or any(_holds(row, name) for row in self.buffers)


def match(pattern: str, name: str) -> dict[str, int] | None:
    """The numbers that the placeholders of `pattern` stand for in `name`; None: no match."""
    # Models have ten thousands of names, and most end otherwise: a regex for each is too slow.
    found = _regex(pattern).fullmatch(name) if name.endswith(_end(pattern)) else None
    return None if found is None else {key: int(text) for key, text in found.groupdict().items()}


def placeholders(pattern: str) -> frozenset[str]:
    """Names of the placeholders of a pattern."""
    return frozenset(_regex(pattern).groupindex)


def fill(pattern: str, numbers: dict[str, int]) -> str:
    """The pattern with placeholders replaced by those numbers that are given."""
    for key, number in numbers.items():
        pattern = pattern.replace(f"{{{key}}}", str(number))
    return pattern


def _holds(row: Buffer, name: str) -> bool:
    """Whether it is the buffer `name` that a row describes, and in a layer that has this one."""
    numbers = match(row.name, name)
    layers = getattr(row, "layers", None)
    return numbers is not None and (layers is None or numbers.get("layer") in layers)


@cache
def _end(pattern: str) -> str:
    return pattern.rpartition("}")[2]


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"\{(\w+)\}", pattern)
    named = [
        f"(?P<{piece}>0|[1-9][0-9]*)" if index % 2 else re.escape(piece)
        for index, piece in enumerate(pieces)
    ]
    return re.compile("".join(named))
