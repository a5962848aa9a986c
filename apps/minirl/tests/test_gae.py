from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.algorithm_config import AlgorithmConfig
from minirl.gae import explained_variance, gae, whitened, with_critic
from rl_core.trajectory import LogProbs, TrainSample

VALUES = st.lists(st.floats(-2, 2), max_size=12)
UNIT = st.floats(0, 1)


def test_gae_by_hand():
    # V = 1, 2, 3 and a reward of 10 with the third token, gamma = lam = 1/2. Errors of the critic:
    # 2/2 - 1 = 0, 3/2 - 2 = -1/2, 10 - 3 = 7. A_3 = 7, A_2 = -1/2 + 7/4, A_1 = 0 + 1.25/4.
    assert gae(10.0, [1.0, 2.0, 3.0], 0.5, 0.5) == [0.3125, 1.25, 7.0]
    assert gae(10.0, [], 0.5, 0.5) == []


@given(VALUES, st.floats(-5, 5), UNIT)
def test_with_lambda_1_an_advantage_is_the_discounted_reward_less_the_value(values, reward, gamma):
    size = len(values)
    expected = [reward * gamma ** (size - 1 - at) - value for at, value in enumerate(values)]
    assert gae(reward, values, gamma, 1.0) == pytest.approx(expected, abs=1e-9)


@given(VALUES, st.floats(-5, 5), UNIT)
def test_with_lambda_0_it_is_the_error_of_the_critic_one_token_ahead(values, reward, gamma):
    after = [gamma * value for value in values[1:]] + [reward]
    expected = [far - near for near, far in zip(values, after, strict=True)] if values else []
    assert gae(reward, values, gamma, 0.0) == pytest.approx(expected, abs=1e-9)


@given(st.integers(1, 9), st.floats(-5, 5), UNIT)
def test_a_critic_that_is_right_leaves_no_advantage(size, reward, lam):
    assert gae(reward, [reward] * size, 1.0, lam) == pytest.approx([0.0] * size, abs=1e-9)


def test_whitening_by_hand():
    # 0, 0, 0, 4: mean 1, variance 12 / 3.
    assert whitened([[0.0, 0.0], [], [0.0, 4.0]]) == [
        pytest.approx([-0.5, -0.5]),
        [],
        pytest.approx([-0.5, 1.5]),
    ]
    assert whitened([[3.0]]) == [[0.0]]


def test_explained_variance_by_hand():
    assert explained_variance([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1
    assert explained_variance([5.0, 5.0, 5.0], [1.0, 2.0, 3.0]) == 0
    assert explained_variance([3.0, 2.0, 1.0], [1.0, 2.0, 3.0]) == pytest.approx(-3)
    assert explained_variance([1.0, 2.0], [1.0, 1.0]) == 0


def sample(reward):
    return SimpleNamespace(reward=reward, advantage=reward, advantages=None)


def test_the_batch_carries_what_the_critic_is_trained_on():
    # lam = 1: advantages 1 - 0.25 and 1 - 0.5, and 0 - 0.75; the masked sample counts nowhere.
    batch = [TrainSample([1], [2] * size, [mask] * size) for size, mask in ((2, 1), (1, 1), (3, 0))]
    samples = [sample(1.0), sample(0.0), sample(None)]
    before = [LogProbs([], [], values) for values in ([0.25, 0.5], [0.75], [9.0, 9.0, 9.0])]
    algorithm = AlgorithmConfig(adv_estimator="ppo", lam=1.0)
    result, metrics = with_critic(batch, samples, before, algorithm)
    assert [item.returns for item in result] == [[1.0, 1.0], [0.0], [0.0, 0.0, 0.0]]
    assert [item.old_values for item in result] == [[0.25, 0.5], [0.75], [9.0, 9.0, 9.0]]
    assert [item.advantages for item in result[:2]] == whitened([[0.75, 0.5], [-0.75]])
    assert samples[0].advantages == result[0].advantages
    assert samples[0].advantage == pytest.approx(sum(result[0].advantages) / 2)
    assert (samples[2].advantage, samples[2].advantages) == (None, None)
    assert metrics["critic/explained_variance"] < 0
    assert with_critic(batch, samples, before, AlgorithmConfig()) == (batch, {})
