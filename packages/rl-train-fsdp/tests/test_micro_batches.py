from hypothesis import given
from hypothesis import strategies as st

from rl_core.trajectory import TrainSample
from rl_train_fsdp.micro_batches import MicroBatch, plan_micro_batches
from rl_train_fsdp.mini_batches import optimizer_steps, split_evenly
from rl_train_fsdp.rows import Row


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


SAMPLES = [
    TrainSample([1, 2], [3, 4, 5], [1, 0, 1], [0.0] * 3, temperature=0.5),
    TrainSample([6], [7], [1], [0.0]),
    TrainSample([1, 2], [8, 9], [1, 0], [0.0] * 2),
]


def test_a_batch_by_hand():
    rows = [Row((6,), (1,), (0,)), Row((1, 2), (0,), (2,))]
    batch = MicroBatch.pack(SAMPLES, rows, loss_only=False)
    # The last token asked about is no input: 7 and 5 are only targets.
    assert batch.input_ids.tolist() == [[6, 0, 0, 0], [1, 2, 3, 4]]
    # Token 7 is predicted by the state of token 6; 3, 4, 5 by those of 2, 3, 4.
    assert batch.positions.tolist() == [0, 5, 6, 7]
    assert batch.targets.tolist() == [7, 3, 4, 5]
    assert batch.temperature.tolist() == [1.0, 0.5, 0.5, 0.5]
    assert (batch.indices, batch.counts) == ((1, 0), (1, 3))
    assert batch.mask is None
    assert batch.position_ids is None
    batch = MicroBatch.pack(SAMPLES, rows, loss_only=True)
    assert batch.targets.tolist() == [7, 3, 5]
    assert batch.positions.tolist() == [0, 5, 7]


def test_a_shared_prompt_by_hand():
    rows = [Row((1, 2), (0, 2), (2, 1)), Row((6,), (1,), (0,))]
    batch = MicroBatch.pack(SAMPLES, rows, loss_only=False)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 8], [6, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2], [0, 0, 0, 0, 0]]
    # 3 and 8 are both predicted by the last token of the prompt, number 1.
    assert batch.positions.tolist() == [1, 2, 3, 1, 4, 5]
    assert batch.targets.tolist() == [3, 4, 5, 8, 9, 7]
    assert (batch.indices, batch.counts) == ((0, 2, 1), (3, 2, 1))
    assert batch.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],  # 8 sees the prompt and itself, not 3 and 4
    ]


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
