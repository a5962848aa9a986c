"""Dealing samples out to actor ranks."""

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def deal(lengths: Sequence[int], ranks: int, mini_batch: int) -> list[list[int]]:
    """Positions of the samples of each rank, balanced by tokens within every mini-batch.

    Consecutive blocks of `mini_batch` samples become mini-batches, so each rank gets
    `mini_batch / ranks` samples of every block, in block order. Within a block, samples go
    longest first to the rank with the fewest tokens that still has room (the greedy rule for
    balanced partitions).

    Args:
        lengths: tokens of each sample.
        ranks: number of actor ranks.
        mini_batch: samples per optimizer step over all ranks; a multiple of `ranks`.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(lengths), mini_batch):
        block = range(start, min(start + mini_batch, len(lengths)))
        for rank, positions in enumerate(_balance(block, lengths, ranks)):
            dealt[rank].extend(positions)
    return dealt


def _balance(block: range, lengths: Sequence[int], ranks: int) -> list[list[int]]:
    room = -(-len(block) // ranks)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for position in sorted(block, key=lambda index: -lengths[index]):
        rank = min(
            (rank for rank in range(ranks) if len(parts[rank]) < room), key=lambda r: tokens[r]
        )
        parts[rank].append(position)
        tokens[rank] += lengths[position]
    return parts


def gather(dealt: Sequence[Sequence[int]], results: Sequence[Sequence[Item]]) -> list[Item]:
    """Results of all ranks, back in the order of the samples."""
    flat = {
        position: result
        for positions, part in zip(dealt, results, strict=True)
        for position, result in zip(positions, part, strict=True)
    }
    return [flat[position] for position in range(len(flat))]
