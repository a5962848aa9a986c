import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.advantages import grpo

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=20)


def test_a_worked_example():
    # Group 0: mean 0.5, sample standard deviation sqrt(0.5). Group 1: equal rewards.
    values = grpo([0.0, 1.0, 2.0, 2.0], [0, 0, 1, 1], norm_by_std=True)
    assert values[0] == pytest.approx(-0.5 / math.sqrt(0.5), rel=1e-5)
    assert values[1] == pytest.approx(0.5 / math.sqrt(0.5), rel=1e-5)
    assert values[2:] == [0.0, 0.0]


def test_without_the_standard_deviation_it_is_the_distance_from_the_mean():
    assert grpo([0.0, 1.0, 5.0], [0, 0, 1], norm_by_std=False) == [-0.5, 0.5, 0.0]


def test_a_sample_without_reward_counts_nowhere():
    assert grpo([0.0, None, 1.0], [0, 0, 0], norm_by_std=False) == [-0.5, None, 0.5]


@given(rewards)
def test_advantages_of_a_group_cancel(values):
    assert sum(grpo(values, [0] * len(values), norm_by_std=True)) == pytest.approx(0, abs=1e-5)


@given(rewards, st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_changes_nothing(values, shift):
    groups = [0] * len(values)
    plain = grpo(values, groups, norm_by_std=False)
    shifted = grpo([value + shift for value in values], groups, norm_by_std=False)
    assert shifted == pytest.approx(plain, abs=1e-9)
