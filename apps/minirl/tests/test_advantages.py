import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.advantages import dr_grpo, estimate_advantages, grpo, reinforce_plus_plus, rloo
from minirl.algorithm_config import AlgorithmConfig

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=20)
ESTIMATORS = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"]
WHOLE_GROUP = ["grpo", "dr_grpo", "rloo"]


def estimate(name, values, groups=None, lengths=None):
    groups = [0] * len(values) if groups is None else groups
    lengths = [3] * len(values) if lengths is None else lengths
    return estimate_advantages(AlgorithmConfig(adv_estimator=name), values, groups, lengths)


def test_grpo_by_hand():
    # Group 0: mean 0.5, sample standard deviation sqrt(0.5). Group 1: equal rewards.
    values = grpo([0.0, 1.0, 2.0, 2.0], [0, 0, 1, 1], norm_by_std=True)
    assert values[0] == pytest.approx(-0.5 / math.sqrt(0.5), rel=1e-5)
    assert values[1] == pytest.approx(0.5 / math.sqrt(0.5), rel=1e-5)
    assert values[2:] == [0.0, 0.0]


def test_without_the_standard_deviation_it_is_the_distance_from_the_mean():
    assert grpo([0.0, 1.0, 5.0], [0, 0, 1], norm_by_std=False) == [-0.5, 0.5, 0.0]


def test_dr_grpo_by_hand():
    # Means 2 and 5, groups interleaved.
    values = dr_grpo([0.0, 4.0, 1.0, 6.0, 5.0], [0, 1, 0, 1, 0])
    assert values == [-2.0, -1.0, -1.0, 1.0, 3.0]


def test_rloo_by_hand():
    # Of 0, 1 and 5 the others' means are 3, 2.5 and 0.5; of 2 and 4 they are 4 and 2.
    values = rloo([0.0, 1.0, 5.0, 2.0, 4.0, 9.0], [0, 0, 0, 1, 1, 2])
    assert values == [-3.0, -1.5, 4.5, -2.0, 2.0, 0.0]


def test_reinforce_plus_plus_by_hand():
    # Tokens 0 0 0 and 4: mean 1, sum of squares 1 + 1 + 1 + 9 = 12, variance 12 / 3 = 4.
    assert reinforce_plus_plus([0.0, 4.0], [3, 1]) == pytest.approx([-0.5, 1.5])
    # A response of no tokens counts nowhere, but has an advantage all the same.
    assert reinforce_plus_plus([0.0, 4.0, 3.0], [3, 1, 0]) == pytest.approx([-0.5, 1.5, 1.0])
    assert reinforce_plus_plus([7.0], [1]) == [0.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_sample_without_reward_counts_nowhere(name):
    (first, second) = estimate(name, [0.0, 1.0])
    assert estimate(name, [0.0, None, 1.0]) == [first, None, second]


def test_ppo_has_the_rewards_until_the_critic_was_asked():
    assert estimate("ppo", [0.0, None, 2.0]) == [0.0, None, 2.0]


def test_an_unknown_estimator_is_an_error():
    with pytest.raises(ValueError, match="remax"):
        estimate("remax", [0.0])


@pytest.mark.parametrize("name", WHOLE_GROUP)
@given(values=rewards)
def test_advantages_of_a_group_cancel(name, values):
    assert sum(estimate(name, values)) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("name", WHOLE_GROUP)
@given(values=rewards, others=rewards)
def test_a_group_does_not_heed_the_others(name, values, others):
    groups = [0] * len(values) + [1] * len(others)
    assert estimate(name, values + others, groups)[: len(values)] == estimate(name, values)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo"])
@given(values=rewards, shift=st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_changes_nothing(name, values, shift):
    shifted = estimate(name, [value + shift for value in values])
    assert shifted == pytest.approx(estimate(name, values), abs=1e-9)


@given(rewards)
def test_leaving_one_out_stretches_the_distance_from_the_mean(values):
    size = len(values)
    stretched = [value * size / (size - 1) for value in estimate("dr_grpo", values)]
    assert estimate("rloo", values) == pytest.approx(stretched, abs=1e-9)


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 9)), min_size=2, max_size=20))
def test_reinforce_plus_plus_has_mean_0_and_variance_1_over_the_tokens(samples):
    values = [float(reward) for reward, _ in samples]
    lengths = [length for _, length in samples]
    found = reinforce_plus_plus(values, lengths)
    tokens = [value for value, length in zip(found, lengths, strict=True) for _ in range(length)]
    assert sum(tokens) == pytest.approx(0, abs=1e-6)
    variance = sum(value**2 for value in tokens) / (len(tokens) - 1)
    assert variance == pytest.approx(float(len(set(values)) > 1), abs=1e-4)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(values=rewards)
def test_more_reward_is_never_less_advantage(name, values):
    ordered = estimate(name, sorted(values))
    assert ordered == sorted(ordered)
