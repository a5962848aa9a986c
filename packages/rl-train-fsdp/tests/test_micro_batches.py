import itertools
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.trajectory import TrainSample
from rl_train_fsdp.micro_batches import BATCH_TOKENS, MicroBatch, plan_micro_batches
from rl_train_fsdp.mini_batches import optimizer_steps, split_evenly
from rl_train_fsdp.rows import Row


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_every_sample_once_within_the_bound(lengths, limit):
    plan = plan_micro_batches(lengths, limit)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    for batch in plan:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= limit


def padded(lengths, plan):
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in plan)


def cost(lengths, plan):
    return padded(lengths, plan) + len(plan) * BATCH_TOKENS


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=7, unique=True), st.integers(1, 9000))
def test_no_other_cut_is_cheaper(lengths, limit):
    """Rows of different lengths, longest first, against every way to cut them."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    best = math.inf
    for cut in itertools.product([False, True], repeat=len(order) - 1):
        ends = [number for number, here in enumerate(cut, 1) if here]
        parts = [order[a:b] for a, b in itertools.pairwise([0, *ends, len(order)])]
        if all(len(part) == 1 or len(part) * lengths[part[0]] <= limit for part in parts):
            best = min(best, cost(lengths, parts))
    assert cost(lengths, plan_micro_batches(lengths, limit)) == best


def test_one_long_row_does_not_pad_the_short_ones():
    lengths = [500] + [20] * 31
    assert plan_micro_batches(lengths, 16384) == [[0], list(range(1, 32))]


@pytest.mark.parametrize(("count", "share"), [(64, 0.15), (256, 0.08)])
def test_little_of_a_mixed_batch_is_padding(count, share):
    """Responses that end anywhere between 20 and 532 tokens, prompt included."""
    random = Random(0)
    lengths = [random.randint(20, 532) for _ in range(count)]
    computed = padded(lengths, plan_micro_batches(lengths, 16384))
    assert 1 - sum(lengths) / computed <= share


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
