import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.trajectory import TrainSample
from rl_train_fsdp.micro_batches import Batching, MicroBatch
from rl_train_fsdp.rows import plan_rows

PROMPTS = st.sampled_from([[1], [1, 2], [2, 3, 4, 5, 6], [2, 3, 4, 5, 7]])


@st.composite
def train_samples(draw):
    response = draw(st.lists(st.integers(10, 60), max_size=12))
    size = len(response)
    mask = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    return TrainSample(draw(PROMPTS), response, mask, [0.0] * size)


GROUPS = st.lists(train_samples(), max_size=12)
WIDTHS = st.one_of(st.none(), st.integers(1, 64))


@given(GROUPS, st.integers(1, 80), WIDTHS, st.booleans())
def test_every_sample_is_in_one_row_behind_its_prompt(samples, limit, width, loss_only):
    rows = plan_rows(samples, loss_only=loss_only, max_tokens=limit, width=width)
    assert sorted(index for row in rows for index in row.samples) == list(range(len(samples)))
    for row in rows:
        assert all(samples[index].prompt_ids == list(row.prompt) for index in row.samples)
        assert len(row.samples) == 1 or row.num_tokens <= limit
        assert width is not None or len(row.samples) == 1


@given(GROUPS, WIDTHS)
def test_sharing_is_never_more_work(samples, width):
    apart = plan_rows(samples, loss_only=False, max_tokens=10_000, width=None)
    shared = plan_rows(samples, loss_only=False, max_tokens=10_000, width=width)
    of_model = width or 1
    assert sum(r.cost(of_model) for r in shared) <= sum(r.cost(of_model) for r in apart)


def test_long_responses_of_a_narrow_model_stay_apart():
    long = TrainSample([1] * 10, [2] * 1000, [1] * 1000)
    assert len(plan_rows([long] * 4, loss_only=False, max_tokens=99_999, width=8)) == 4
    wide = TrainSample([1] * 1000, [2] * 10, [1] * 10)
    assert len(plan_rows([wide] * 4, loss_only=False, max_tokens=99_999, width=8)) == 1


@pytest.mark.parametrize("loss_only", [True, False])
@given(GROUPS, st.integers(1, 80), WIDTHS)
def test_each_token_asked_about_sees_exactly_what_comes_before_it(loss_only, samples, limit, width):
    """By the mask alone: the inputs visible to a state are the sample's own tokens, in order."""
    for rows in Batching(limit, width).plan(samples, loss_only=loss_only):
        batch = MicroBatch.pack(samples, rows, loss_only=loss_only)
        assert len(batch.positions) == len(batch.targets) == sum(batch.counts)
        asked = iter(zip(batch.positions.tolist(), batch.targets.tolist(), strict=True))
        for index, count in zip(batch.indices, batch.counts, strict=True):
            sample = samples[index]
            tokens = sample.prompt_ids + sample.response_ids
            offsets = [o for o, bit in enumerate(sample.loss_mask) if bit or not loss_only]
            assert count == len(offsets)
            for offset, (position, target) in zip(offsets, asked, strict=False):
                end = len(sample.prompt_ids) + offset
                assert target == tokens[end]
                assert seen(batch, position) == list(enumerate(tokens[:end]))
        assert next(asked, None) is None


def seen(batch, position):
    """(position id, token) of what the hidden state at a flat position sees."""
    row, place = divmod(position, batch.input_ids.shape[1])
    ids = batch.input_ids[row].tolist()
    if batch.mask is None:
        return list(enumerate(ids[: place + 1]))
    visible = batch.mask[row, 0, place].nonzero().flatten().tolist()
    return [(int(batch.position_ids[row, other]), ids[other]) for other in visible]
