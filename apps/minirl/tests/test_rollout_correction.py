import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.algorithm_config import RolloutCorrectionConfig
from minirl.rollout_correction import corrected, rollout_is_weights
from rl_core.trajectory import LogProbs, TrainSample

TOKEN = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
SEQUENCE = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=2.0)
TRAINER = [[math.log(0.6), math.log(0.1)], [math.log(0.5)]]
ROLLOUT = [[math.log(0.2), math.log(0.2)], [math.log(0.4)]]


def test_weights_by_hand():
    # Ratios 3, 0.5 and 1.25; 3 is above the cap of 2.
    weights, metrics = rollout_is_weights(TRAINER, ROLLOUT, TOKEN)
    assert weights == [pytest.approx([2.0, 0.5]), pytest.approx([1.25])]
    assert metrics["rollout_is/mean"] == pytest.approx(3.75 / 3)
    assert metrics["rollout_is/capped_fraction"] == pytest.approx(1 / 3)


def test_weights_of_whole_responses_by_hand():
    # 3 * 0.5 = 1.5 for both tokens of the first response.
    weights, metrics = rollout_is_weights(TRAINER, ROLLOUT, SEQUENCE)
    assert weights == [pytest.approx([1.5, 1.5]), pytest.approx([1.25])]
    assert metrics["rollout_is/capped_fraction"] == 0
    assert metrics["rollout_is/mean"] == pytest.approx(4.25 / 3)


RESPONSES = st.lists(st.lists(st.tuples(st.floats(-90, 0), st.floats(-90, 0)), max_size=5))


@pytest.mark.parametrize("config", [TOKEN, SEQUENCE])
@given(responses=RESPONSES)
def test_weights_are_above_0_and_never_above_the_cap(config, responses):
    trainer = [[mine for mine, _ in response] for response in responses]
    rollout = [[theirs for _, theirs in response] for response in responses]
    weights, metrics = rollout_is_weights(trainer, rollout, config)
    assert [len(response) for response in weights] == [len(response) for response in responses]
    assert all(0 < weight <= 2.0 for response in weights for weight in response)
    assert 0 <= metrics["rollout_is/capped_fraction"] <= 1
    same, metrics = rollout_is_weights(trainer, trainer, config)
    assert all(weight == 1 for response in same for weight in response)
    assert metrics["rollout_is/capped_fraction"] == 0


def sample(rollout, reason="stop"):
    return SimpleNamespace(completion=SimpleNamespace(finish_reason=reason, log_probs=rollout))


def test_the_batch_carries_the_weights_and_aborted_samples_are_not_weighed():
    batch = [TrainSample([1], [2] * size, [1] * size) for size in (2, 1, 1)]
    samples = [sample(ROLLOUT[0]), sample([], "abort"), sample(ROLLOUT[1])]
    trainer = [LogProbs(TRAINER[0], []), LogProbs([-1.0], []), LogProbs(TRAINER[1], [])]
    weighed, metrics = corrected(batch, samples, trainer, TOKEN)
    assert [item.rollout_is_weights for item in weighed] == [
        pytest.approx([2.0, 0.5]),
        [1.0],
        pytest.approx([1.25]),
    ]
    assert metrics["rollout_is/mean"] == pytest.approx(3.75 / 3)
    assert corrected(batch, samples, trainer, RolloutCorrectionConfig()) == (batch, {})
