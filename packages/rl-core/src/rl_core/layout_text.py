"""A layout spec as lines of text, to be read by people."""

from collections.abc import Iterator

from rl_core.layout import Buffer, Constant, Frequencies, LayoutSpec, Parameter, Part


def described(spec: LayoutSpec) -> Iterator[str]:
    """One line for each row of the table: what a rank's tensor is made of, and how it is cut."""
    yield (
        f"{spec.family} in {spec.engine} on {spec.device}: {spec.layers} layers, "
        f"{spec.kv_heads} key-value heads, {spec.dtype}"
    )
    yield from (f"{row.name} <- {_made_of(row)}" for row in spec.parameters)
    yield from (f"{row.name} = {_value(row)}" for row in spec.buffers)
    yield from (f"not used by the engine: {pattern}" for pattern in spec.unused)
    yield from (f"unverifiable: {pattern}" for pattern in spec.unknown)


def _made_of(row: Parameter) -> str:
    parts = " + ".join(_part(part) for part in row.parts)
    notes = [f"padded to {row.pad}"] if row.pad > 1 else []
    if row.change != "none":
        notes.append(row.change.replace("_", " "))
    if row.dtype is not None:
        notes.append(row.dtype)
    return f"{parts} ({', '.join(notes)})" if notes else parts


def _part(part: Part) -> str:
    return part.source if part.cut == "whole" else f"{part.source}[{part.cut}]"


def _value(row: Buffer) -> str:
    if isinstance(row, Constant):
        return f"{row.value} {row.shape} {row.dtype}"
    if isinstance(row, Frequencies):
        return f"rotary frequencies ({row.dim // 2},) base {row.base} float32"
    where = "" if row.layers is None else f" in layers {', '.join(map(str, row.layers))}"
    return f"rotary table ({row.positions}, {row.dim}) base {row.base} {row.dtype}{where}"
