"""Attention over many sequences at once, for SGLang's torch attention on cpu.

SGLang's own goes through the requests one by one: a batch of 256 in a model of four layers makes a
thousand small operations for each token, each of them a meeting of all compute threads. Here
sequences of similar length are padded to one and computed together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_ELEMENTS = 1 << 22
"""Elements of the padded keys, and of the scores, of one group: what stays in a cache."""

SLACK = 32
"""Tokens by which the longest sequence of a group may exceed twice the shortest."""


@dataclass(frozen=True)
class Span:
    """One sequence of a batch.

    Attributes:
        index: its number in the batch.
        start: first row of its queries.
        queries: number of its queries, which are its last tokens.
        length: its tokens, those of the queries included.
    """

    index: int
    start: int
    queries: int
    length: int


@dataclass(frozen=True)
class Cache:
    """Where keys and values are.

    Attributes:
        keys: [slots, kv_heads, dim].
        values: [slots, kv_heads, dim].
        tables: [requests, length]; the slot of each token of each request.
        rows: [sequences]; the row of `tables` of each sequence of the batch.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor


def spans_of(lengths: Sequence[int], queries: Sequence[int]) -> list[Span]:
    """The sequences of a batch whose queries follow each other."""
    spans, start = [], 0
    for index, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        spans.append(Span(index, start, count, length))
        start += count
    return spans


def attend(
    query: torch.Tensor,
    output: torch.Tensor,
    cache: Cache,
    spans: Sequence[Span],
    scale: float | None,
    alone: Callable[[Span], None],
) -> int:
    """Causal attention of all sequences; the number of groups that it took.

    Args:
        query: [rows, heads, dim].
        output: [rows, heads, dim], written.
        cache: keys and values, those of the queries included.
        spans: the sequences.
        scale: of the scores; None for 1/sqrt(dim).
        alone: computes a sequence that has nothing to be grouped with and several queries.
    """
    width = max(cache.keys[0].numel(), query.shape[1])
    groups = 0
    for group in grouped(spans, width, query.shape[1]):
        groups += 1
        if len(group) == 1 and group[0].queries > 1:
            alone(group[0])
        else:
            _attend_together(query, output, cache, group, scale)
    return groups


def grouped(spans: Sequence[Span], width: int, heads: int) -> Iterator[list[Span]]:
    """Sequences of similar length, as many as stay below `MAX_ELEMENTS` when padded."""
    group: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.length, span.queries)):
        widest = max([span.queries, *(item.queries for item in group)])
        elements = (len(group) + 1) * span.length * max(width, heads * widest)
        unlike = bool(group) and span.length > 2 * group[0].length + SLACK
        if group and (unlike or elements > MAX_ELEMENTS):
            yield group
            group = []
        group.append(span)
    if group:
        yield group


def _attend_together(
    query: torch.Tensor,
    output: torch.Tensor,
    cache: Cache,
    group: Sequence[Span],
    scale: float | None,
) -> None:
    lengths = torch.tensor([span.length for span in group])
    counts = torch.tensor([span.queries for span in group])
    longest, widest = int(lengths.max()), int(counts.max())
    slots = cache.tables[cache.rows[[span.index for span in group]], :longest].long()
    there = torch.arange(longest) < lengths[:, None]
    # A padded place repeats a token of its own sequence: elsewhere there could be a NaN.
    slots = torch.where(there, slots, slots[:, :1])
    steps = torch.arange(widest)
    starts = torch.tensor([span.start for span in group])
    asked = steps < counts[:, None]
    rows = starts[:, None] + torch.minimum(steps, counts[:, None] - 1)
    keys, values = (_per_head(item, slots, query.dtype) for item in (cache.keys, cache.values))
    found = scaled_dot_product_attention(
        query[rows].transpose(1, 2),
        keys,
        values,
        attn_mask=_mask(lengths, counts, longest, widest),
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    output[rows[asked]] = found.transpose(1, 2)[asked]


def _per_head(cached: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[sequences, heads, length, dim]."""
    return cached[slots].transpose(1, 2).to(dtype)


def _mask(
    lengths: torch.Tensor, counts: torch.Tensor, longest: int, widest: int
) -> torch.Tensor | None:
    """Which keys each query sees, [sequences, 1, queries, keys]; None if all see everything."""
    if widest == 1 and bool((lengths == longest).all()):
        return None
    last = lengths[:, None] - counts[:, None] + torch.arange(widest)
    seen = torch.arange(longest) <= last[:, :, None]
    return (seen & (torch.arange(longest) < lengths[:, None, None]))[:, None]
