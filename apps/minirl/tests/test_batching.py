from hypothesis import given
from hypothesis import strategies as st

from minirl.batching import deal, gather


@st.composite
def batches(draw):
    ranks = draw(st.integers(1, 4))
    mini_batch = ranks * draw(st.integers(1, 5))
    count = mini_batch * draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))
    return lengths, ranks, mini_batch


@given(batches())
def test_every_sample_is_dealt_once_and_every_rank_gets_as_many(batch):
    lengths, ranks, mini_batch = batch
    dealt = deal(lengths, ranks, mini_batch)
    assert sorted(position for part in dealt for position in part) == list(range(len(lengths)))
    assert {len(part) for part in dealt} == {len(lengths) // ranks}


@given(batches())
def test_mini_batches_are_blocks_of_the_batch(batch):
    lengths, ranks, mini_batch = batch
    dealt = deal(lengths, ranks, mini_batch)
    share = mini_batch // ranks
    for block in range(len(lengths) // mini_batch):
        members = {p for part in dealt for p in part[block * share : (block + 1) * share]}
        assert members == set(range(block * mini_batch, (block + 1) * mini_batch))


@given(batches())
def test_no_rank_has_more_than_the_longest_sample_too_many(batch):
    lengths, ranks, mini_batch = batch
    share = mini_batch // ranks
    for start in range(0, len(lengths), mini_batch):
        index = start // mini_batch
        loads = [
            sum(lengths[p] for p in part[index * share : (index + 1) * share])
            for part in deal(lengths, ranks, mini_batch)
        ]
        assert max(loads) - min(loads) <= max(lengths[start : start + mini_batch]) * share


@given(batches(), st.integers(1, 9))
def test_groups_are_split_only_where_no_rank_has_room(batch, size):
    lengths, ranks, mini_batch = batch
    groups = [position // size for position in range(len(lengths))]
    dealt = deal(lengths, ranks, mini_batch, groups)
    assert sorted(position for part in dealt for position in part) == list(range(len(lengths)))
    assert {len(part) for part in dealt} == {len(lengths) // ranks}
    if (mini_batch // ranks) % size == 0:
        homes = {(groups[p], rank) for rank, part in enumerate(dealt) for p in part}
        assert len(homes) == len(set(groups))


@given(batches())
def test_gather_undoes_deal(batch):
    lengths, ranks, mini_batch = batch
    dealt = deal(lengths, ranks, mini_batch)
    results = [[lengths[position] for position in part] for part in dealt]
    assert gather(dealt, results) == lengths
