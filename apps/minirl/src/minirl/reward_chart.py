"""A curve in a terminal."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

_LEVELS = " ▁▂▃▄▅▆▇█"


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Lines of a bar chart, the highest first, each with the value at its upper edge.

    Args:
        values: at least one; averaged where there are more than columns.
        width: columns.
        height: lines.
    """
    columns = _columns(values, width)
    low, high = min(0.0, *columns), max(columns)
    span = (high - low) or 1.0
    heights = [(value - low) / span * height for value in columns]
    lines = []
    for row in range(height, 0, -1):
        bars = "".join(_LEVELS[_eighths(filled - (row - 1))] for filled in heights)
        lines.append(f"{low + span * row / height:8.3g} {bars}".rstrip())
    return lines


def _eighths(filled: float) -> int:
    """How much of a cell is filled."""
    return max(0, min(8, round(filled * 8)))


def _columns(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [at * len(values) // width for at in range(width + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(edges)]
