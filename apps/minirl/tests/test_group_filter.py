from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from minirl.group_filter import informative_groups, keep_informative


def samples(*groups):
    return [
        SimpleNamespace(group=number, raw_reward=reward, kept=True)
        for number, rewards in enumerate(groups)
        for reward in rewards
    ]


def test_groups_of_equal_rewards_are_left_out():
    rewards = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, None, None, None, 1.0]
    assert informative_groups(rewards, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]) == [1]


def test_the_first_groups_that_differ_are_kept_and_no_more_than_wanted():
    items = samples([1, 1], [0, 1], [0, 0], [1, 0], [0, 1])
    assert keep_informative(items, 2) == 2
    assert [item.group for item in items if item.kept] == [1, 1, 3, 3]
    assert keep_informative(items, 4) == 3
    assert [item.group for item in items if item.kept] == [1, 1, 3, 3, 4, 4]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), max_size=8), st.integers(1, 8))
def test_whole_groups_are_kept_and_each_of_them_can_be_learned_from(groups, wanted):
    items = samples(*groups)
    count = keep_informative(items, wanted)
    kept = {item.group for item in items if item.kept}
    left = {item.group for item in items if not item.kept}
    assert not kept & left
    assert len(kept) == count <= wanted
    assert all(len(set(groups[group])) == 2 for group in kept)
    assert count == wanted or all(len(set(groups[group])) == 1 for group in left)
