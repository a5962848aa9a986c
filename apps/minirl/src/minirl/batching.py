"""Dealing samples out to actor ranks."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def deal(
    lengths: Sequence[int], ranks: int, mini_batch: int, groups: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Positions of the samples of each rank, balanced by tokens within every mini-batch.

    Consecutive blocks of `mini_batch` samples become mini-batches, so each rank gets
    `mini_batch / ranks` samples of every block, in block order. Within a block, groups go
    longest first to the rank with the fewest tokens that still has room (the greedy rule for
    balanced partitions); one that does not fit goes on at the next rank.

    Args:
        lengths: tokens of each sample.
        ranks: number of actor ranks.
        mini_batch: samples per optimizer step over all ranks; a multiple of `ranks`.
        groups: of each sample; those of one group stay together as far as they can, because a
            rank computes their common prompt once. None: every sample is alone.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    keys = range(len(lengths)) if groups is None else groups
    for start in range(0, len(lengths), mini_batch):
        block = range(start, min(start + mini_batch, len(lengths)))
        for rank, positions in enumerate(_balance(_grouped(block, keys), lengths, ranks)):
            dealt[rank].extend(positions)
    return dealt


def _grouped(block: range, keys: Sequence[Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for position in block:
        groups.setdefault(keys[position], []).append(position)
    return list(groups.values())


def _balance(groups: list[list[int]], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    room = -(-sum(map(len, groups)) // ranks)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for group in sorted(groups, key=lambda group: -sum(lengths[index] for index in group)):
        rest = group
        while rest:
            rank = _emptiest(parts, tokens, room, len(rest))
            free = room - len(parts[rank])
            taken, rest = rest[:free], rest[free:]
            parts[rank] += taken
            tokens[rank] += sum(lengths[index] for index in taken)
    return parts


def _emptiest(parts: list[list[int]], tokens: list[int], room: int, count: int) -> int:
    """The rank with the fewest tokens that has room for `count` samples, or for any."""
    free = [room - len(part) for part in parts]
    wide = [rank for rank, places in enumerate(free) if places >= count]
    return min(wide or [rank for rank, places in enumerate(free) if places], key=tokens.__getitem__)


def gather(dealt: Sequence[Sequence[int]], results: Sequence[Sequence[Item]]) -> list[Item]:
    """Results of all ranks, back in the order of the samples."""
    flat = {
        position: result
        for positions, part in zip(dealt, results, strict=True)
        for position, result in zip(positions, part, strict=True)
    }
    return [flat[position] for position in range(len(flat))]
