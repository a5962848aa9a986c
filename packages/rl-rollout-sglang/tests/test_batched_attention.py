"""Sequences computed together are what each of them is alone, however they are grouped."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rl_rollout_sglang import batched_attention
from rl_rollout_sglang.batched_attention import Cache, attend, grouped, spans_of

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 8, 400


def make_cache(lengths):
    """Tables with the slots of each sequence, and NaN in every slot that is nobody's."""
    keys = torch.full((SLOTS, KV_HEADS, DIM), torch.nan)
    values = keys.clone()
    tables = torch.zeros(len(lengths) + 3, max(lengths) + 5, dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 3)[: len(lengths)]
    free = (1 + torch.randperm(SLOTS - 1)).tolist()
    for row, length in zip(rows.tolist(), lengths, strict=True):
        slots = torch.tensor([free.pop() for _ in range(length)])
        tables[row, :length] = slots.int()
        keys[slots] = torch.randn(length, KV_HEADS, DIM)
        values[slots] = torch.randn(length, KV_HEADS, DIM)
    return Cache(keys, values, tables, rows)


def reference(query, cache, span, scale):
    slots = cache.tables[cache.rows[span.index], : span.length].long()
    keys, values = (item[slots].transpose(0, 1)[None] for item in (cache.keys, cache.values))
    asked = query[span.start : span.start + span.queries].transpose(0, 1)[None]
    last = span.length - span.queries + torch.arange(span.queries)
    mask = torch.arange(span.length) <= last[:, None]
    found = scaled_dot_product_attention(
        asked, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return found[0].transpose(0, 1)


@pytest.mark.parametrize(
    ("lengths", "queries"),
    [
        ([5, 5, 5], [1, 1, 1]),
        ([1, 9, 40, 3, 9], [1, 1, 1, 1, 1]),
        ([4, 9, 30, 2], [4, 3, 30, 1]),
        ([7], [7]),
    ],
)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_together_equals_alone(lengths, queries, scale):
    torch.manual_seed(0)
    cache, spans = make_cache(lengths), spans_of(lengths, queries)
    query = torch.randn(sum(queries), HEADS, DIM)
    output = torch.full_like(query, torch.nan)
    expected = torch.cat([reference(query, cache, span, scale) for span in spans])

    def alone(span):
        output[span.start : span.start + span.queries] = reference(query, cache, span, scale)

    attend(query, output, cache, spans, scale, alone)
    assert torch.allclose(output, expected, atol=1e-6)


def test_a_batch_of_equal_lengths_is_one_group():
    assert len(list(grouped(spans_of([20] * 256, [1] * 256), 64, 4))) == 1


def test_groups_are_bounded_in_padding_and_in_size(monkeypatch):
    monkeypatch.setattr(batched_attention, "MAX_ELEMENTS", 4096)
    lengths = [1, 2, 3, 200, 210, 1000, 10, 10, 10, 10]
    spans = spans_of(lengths, [1] * len(lengths))
    groups = list(grouped(spans, 8, 4))
    assert sorted(span.index for group in groups for span in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(span.length for span in group)
        assert longest <= 2 * min(span.length for span in group) + batched_attention.SLACK
        assert len(group) == 1 or len(group) * longest * 8 <= 4096
