import itertools

from hypothesis import given
from hypothesis import strategies as st

from rl_ckpt_disk.read_ahead import LARGE, ReadBuffers, buckets
from rl_core.buckets import align
from rl_core.metadata import TensorMeta

SIZES = st.lists(st.integers(0, 300), max_size=30)


@given(SIZES, st.integers(16, 200))
def test_every_tensor_is_in_one_bucket_in_order(sizes, capacity):
    metas = [TensorMeta(f"t{n}", (size,), "uint8") for n, size in enumerate(sizes)]
    plan = buckets(metas, capacity)
    assert [meta for bucket in plan for meta in bucket.tensors] == metas
    for bucket in plan:
        assert bucket.tensors
        assert bucket.nbytes <= capacity or len(bucket.tensors) == 1


@given(SIZES, st.integers(16, 200))
def test_memory_is_two_buckets_and_the_largest_tensor(sizes, capacity):
    metas = [TensorMeta(f"t{n}", (size,), "uint8") for n, size in enumerate(sizes)]
    plan = buckets(metas, capacity)
    buffers = ReadBuffers()
    buffers.reserve(plan)
    held = {bucket.buffer: buffers.of(bucket).numel() for bucket in plan}
    largest = max((align(size) for size in sizes), default=0)
    assert held.get(LARGE, 0) <= largest
    assert all(held.get(number, 0) <= capacity for number in (0, 1))
    assert all(buffers.of(bucket).numel() >= bucket.nbytes for bucket in plan)


@given(SIZES, st.integers(16, 200))
def test_neighbours_share_no_buffer_unless_both_are_large(sizes, capacity):
    metas = [TensorMeta(f"t{n}", (size,), "uint8") for n, size in enumerate(sizes)]
    plan = buckets(metas, capacity)
    for left, right in itertools.pairwise(plan):
        assert left.buffer != right.buffer or left.buffer == LARGE
