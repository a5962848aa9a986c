"""Where two contents of one tensor part: the first element, in row-major order."""

from collections.abc import Callable

from rl_core.interfaces import LiveContent
from rl_core.metadata import DTYPE_BYTES


def first_difference(
    expected: bytes, shape: tuple[int, ...], dtype: str, live_at: Callable[[int], LiveContent]
) -> tuple[int, ...] | None:
    """Index of the first element that differs; None if none does, or if the kinds differ.

    Args:
        expected: bytes that must be there, or the first of them.
        shape: of the whole tensor.
        dtype: of it.
        live_at: gives a piece of the live tensor, from a byte on.
    """
    start = 0
    while start < len(expected):
        piece = live_at(start)
        if (piece.shape, piece.dtype) != (shape, dtype) or not piece.data:
            return None
        mine = expected[start : start + len(piece.data)]
        byte = _first_unequal(mine, piece.data[: len(mine)])
        if byte is not None:
            return _index((start + byte) // DTYPE_BYTES[dtype], shape)
        start += len(mine)
    return None


def _first_unequal(mine: bytes, theirs: bytes) -> int | None:
    """Position of the first byte that differs, by halving."""
    if mine == theirs:
        return None
    low, high = 0, len(mine)
    while high - low > 1:
        middle = (low + high) // 2
        if mine[low:middle] != theirs[low:middle]:
            high = middle
        else:
            low = middle
    return low


def _index(element: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(shape):
        element, position = divmod(element, size)
        found.append(position)
    return tuple(reversed(found))
