from hypothesis import given
from hypothesis import strategies as st

from rl_core.trajectory import TrainSample
from rl_train_fsdp.micro_batches import MicroBatch, plan_micro_batches
from rl_train_fsdp.mini_batches import optimizer_steps, split_evenly


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_every_sample_once_within_the_bound(lengths, limit):
    plan = plan_micro_batches(lengths, limit)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    for batch in plan:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= limit


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(50, 200))
def test_batches_hold_neighbours_in_length(lengths, limit):
    plan = plan_micro_batches(lengths, limit)
    shortest = [min(lengths[i] for i in batch) for batch in plan]
    longest = [max(lengths[i] for i in batch) for batch in plan]
    assert all(a >= b for a, b in zip(shortest, longest[1:], strict=False))


def test_a_batch_by_hand():
    samples = [
        TrainSample([1, 2], [3, 4, 5], [1, 0, 1], [0.0] * 3, temperature=0.5),
        TrainSample([6], [7], [1], [0.0]),
    ]
    batch = MicroBatch.pack(samples, [1, 0], loss_only=False)
    assert batch.input_ids.tolist() == [[6, 7, 0, 0, 0], [1, 2, 3, 4, 5]]
    # Token 7 is predicted by the state of token 6; 3, 4, 5 by those of 2, 3, 4.
    assert batch.positions.tolist() == [0, 6, 7, 8]
    assert batch.targets.tolist() == [7, 3, 4, 5]
    assert batch.temperature.tolist() == [1.0, 0.5, 0.5, 0.5]
    assert (batch.indices, batch.counts) == ((1, 0), (1, 3))
    batch = MicroBatch.pack(samples, [1, 0], loss_only=True)
    assert batch.targets.tolist() == [7, 3, 5]
    assert batch.positions.tolist() == [0, 6, 8]


@given(st.integers(0, 100), st.integers(1, 20))
def test_mini_batches_are_even(count, parts):
    ranges = split_evenly(count, parts)
    assert [index for part in ranges for index in part] == list(range(count))
    sizes = [len(part) for part in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_optimizer_steps_by_hand():
    assert optimizer_steps(256, 128) == 2
    assert optimizer_steps(257, 128) == 3
    assert optimizer_steps(256, None) == 1
    assert optimizer_steps(0, 128) == 1
