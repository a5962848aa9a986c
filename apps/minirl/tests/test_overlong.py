from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.algorithm_config import OverlongBufferConfig
from minirl.overlong import overlong_penalty, shape_rewards


def sample(length, reward):
    completion = SimpleNamespace(token_ids=[0] * length)
    return SimpleNamespace(completion=completion, raw_reward=reward, reward=None)


def test_the_penalty_by_hand():
    # Limit 20, buffer 4: none up to 16, a quarter for each token more.
    buffer = OverlongBufferConfig(enable=True, len=4, penalty_factor=1.0)
    found = [overlong_penalty(length, 20, buffer) for length in (0, 16, 17, 18, 20)]
    assert found == [0, 0, -0.25, -0.5, -1.0]
    half = OverlongBufferConfig(enable=True, len=4, penalty_factor=0.5)
    assert overlong_penalty(18, 20, half) == -0.25


@given(st.integers(1, 50), st.integers(1, 50), st.floats(0, 10))
def test_the_penalty_falls_from_0_to_the_factor(longest, size, factor):
    buffer = OverlongBufferConfig(enable=True, len=min(size, longest), penalty_factor=factor)
    found = [overlong_penalty(length, longest, buffer) for length in range(longest + 1)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (0 if buffer.len < longest else found[0], -factor)


def test_what_is_trained_on_is_the_reward_less_the_penalty():
    samples = [sample(16, 1.0), sample(18, 1.0), sample(20, None)]
    shape_rewards(samples, 20, OverlongBufferConfig(enable=True, len=4))
    assert [item.reward for item in samples] == [1.0, 0.5, None]
    assert [item.raw_reward for item in samples] == [1.0, 1.0, None]
    shape_rewards(samples, 20, OverlongBufferConfig())
    assert [item.reward for item in samples] == [1.0, 1.0, None]


def test_a_buffer_as_long_as_the_limit_begins_at_0_tokens():
    buffer = OverlongBufferConfig(enable=True, len=20)
    assert overlong_penalty(10, 20, buffer) == pytest.approx(-0.5)
