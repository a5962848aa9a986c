import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.buckets import ALIGNMENT, MEGABYTE, BucketCursor, align, bucket_bytes, plan
from rl_core.errors import ConfigError
from rl_core.metadata import TensorMeta

sizes = st.lists(
    st.integers(0, 200) | st.integers(-1, 1).map(lambda delta: 64 + delta), max_size=30
)
capacities = st.sampled_from([16, 32, 48, 64, 128, 1024])


def metas(nbytes):
    return [TensorMeta(f"t{index}", (size,), "uint8") for index, size in enumerate(nbytes)]


@given(sizes, capacities)
def test_every_byte_travels_exactly_once_in_order(nbytes, capacity):
    slots = {}
    for bucket in plan(metas(nbytes), capacity):
        for meta, slot in bucket:
            slots.setdefault(meta.name, []).append(slot)
    assert len(slots) == len(nbytes)
    for meta in metas(nbytes):
        runs = slots[meta.name]
        assert [run.start for run in runs] == [
            sum(before.nbytes for before in runs[:index]) for index in range(len(runs))
        ]
        assert sum(run.nbytes for run in runs) == meta.nbytes
        assert len(runs) == 1 or all(run.nbytes for run in runs)


@given(sizes, capacities)
def test_slots_are_aligned_inside_the_bucket_and_do_not_overlap(nbytes, capacity):
    for number, bucket in enumerate(plan(metas(nbytes), capacity)):
        end = 0
        for _, slot in bucket:
            assert slot.bucket == number
            assert slot.offset % ALIGNMENT == 0
            assert slot.offset >= end
            end = slot.offset + slot.nbytes
            assert end <= capacity


@given(sizes, capacities)
def test_only_what_does_not_fit_is_split(nbytes, capacity):
    counts = {}
    for bucket in plan(metas(nbytes), capacity):
        for meta, _ in bucket:
            counts[meta.name] = counts.get(meta.name, 0) + 1
    for meta in metas(nbytes):
        assert counts[meta.name] == max(1, math.ceil(meta.nbytes / capacity))


@given(sizes, capacities)
def test_no_bucket_is_empty_and_none_is_skipped(nbytes, capacity):
    buckets = plan(metas(nbytes), capacity)
    assert all(buckets)
    assert bool(buckets) == bool(nbytes)


@pytest.mark.parametrize(
    ("nbytes", "buckets"),
    [
        ([64], 1),
        ([63], 1),
        ([65], 2),
        ([48, 16], 1),
        ([48, 17], 2),
        ([49, 1], 2),
        ([64, 0], 1),
        ([0, 64], 1),
        ([0, 0], 1),
        ([128, 1], 3),
        ([129, 1], 3),
        ([1, 128], 3),
    ],
)
def test_around_the_capacity(nbytes, buckets):
    assert len(plan(metas(nbytes), 64)) == buckets


def test_an_odd_bfloat16_before_a_float32_leaves_it_aligned():
    tensors = [TensorMeta("a", (3,), "bfloat16"), TensorMeta("b", (2,), "float32")]
    [[(_, first), (_, second)]] = plan(tensors, 64)
    assert (first.offset, second.offset) == (0, 16)


def test_split_tensors_start_a_bucket_and_later_ones_may_share_their_rest():
    [[(_, first)], [(_, head)], [(_, tail), (_, after)]] = plan(metas([16, 80, 16]), 64)
    assert (first.offset, head.offset, head.nbytes) == (0, 0, 64)
    assert (tail.offset, tail.nbytes, after.offset) == (0, 16, 16)


@given(st.integers(0, 10**12))
def test_align(nbytes):
    assert 0 <= align(nbytes) - nbytes < ALIGNMENT
    assert align(nbytes) % ALIGNMENT == 0


@given(st.floats(0.001, 4096), sizes)
def test_a_bucket_is_never_larger_than_configured_or_than_the_payload(megabytes, nbytes):
    size = bucket_bytes(megabytes, metas(nbytes))
    assert size % ALIGNMENT == 0
    assert ALIGNMENT <= size <= max(ALIGNMENT, megabytes * MEGABYTE)
    assert size <= max(ALIGNMENT, sum(align(item) for item in nbytes))
    BucketCursor(size)


@pytest.mark.parametrize("megabytes", [0, -1, 1e-6])
def test_too_small_a_bucket_is_a_config_error(megabytes):
    with pytest.raises(ConfigError, match="too small"):
        bucket_bytes(megabytes, [])


@pytest.mark.parametrize("capacity", [0, 8, 17, -16])
def test_an_unaligned_capacity_is_a_config_error(capacity):
    with pytest.raises(ConfigError, match="multiple"):
        BucketCursor(capacity)
