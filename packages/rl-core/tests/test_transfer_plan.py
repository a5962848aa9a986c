from hypothesis import given
from hypothesis import strategies as st

from rl_core.buckets import ALIGNMENT
from rl_core.metadata import DTYPE_BYTES, TensorMeta
from rl_core.transfer.plan import TransferPlan

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(sorted(DTYPE_BYTES))), max_size=20).map(
    lambda items: [TensorMeta(f"t{n}", *item) for n, item in enumerate(items)]
)
CAPACITIES = st.integers(1, 40).map(lambda words: words * ALIGNMENT)


@given(TENSORS, CAPACITIES, st.integers(0, 300))
def test_every_byte_is_in_exactly_one_place(tensors, capacity, direct_bytes):
    plan = TransferPlan.of(tensors, capacity, direct_bytes)
    seen = {meta.name: 0 for meta in tensors}
    order = []
    for bucket in plan.buckets:
        end = 0
        for segment in bucket.segments:
            assert segment.bucket == bucket.number
            assert segment.offset >= end
            end = segment.offset + segment.nbytes
            inner = segment.offset
            for part in segment.parts:
                assert part.slot.offset >= inner
                assert part.slot.offset % ALIGNMENT == 0
                inner = part.slot.offset + part.slot.nbytes
                assert part.slot.start == seen[part.meta.name]
                seen[part.meta.name] += part.slot.nbytes
                if part.first:
                    order.append(part.meta.name)
            assert inner == end
        assert end == bucket.nbytes <= capacity
    assert seen == {meta.name: meta.nbytes for meta in tensors}
    assert order == [meta.name for meta in tensors]


@given(TENSORS, CAPACITIES, st.integers(1, 300))
def test_large_tensors_and_only_they_travel_alone(tensors, capacity, direct_bytes):
    for bucket in TransferPlan.of(tensors, capacity, direct_bytes).buckets:
        for segment in bucket.segments:
            large = [part.meta.nbytes >= direct_bytes for part in segment.parts]
            assert large == [True] if segment.direct else not any(large)


@given(TENSORS, CAPACITIES)
def test_largest_split_tensor_is_known(tensors, capacity):
    split = [meta.nbytes for meta in tensors if meta.nbytes > capacity]
    assert TransferPlan.of(tensors, capacity).joined_bytes == max(split, default=0)


def test_nothing_needs_no_bucket():
    assert TransferPlan.of([], ALIGNMENT).buckets == ()
