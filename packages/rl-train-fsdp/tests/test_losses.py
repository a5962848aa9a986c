import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import ConfigError
from rl_core.trajectory import TrainSample
from rl_train_fsdp.config import LossConfig
from rl_train_fsdp.losses import (
    METRICS,
    LossInputs,
    clipped_surrogate,
    kl_k3,
    policy_loss,
    sequence_log_ratio,
    value_loss,
)
from rl_train_fsdp.mini_batches import loss_sizes, token_weight
from rl_train_fsdp.policy import TokenScores


def test_the_clipped_surrogate_by_hand():
    # eps 0.2. Ratio 1.5 with A = 2: min(3, 2.4) = 2.4 is kept, clipped. Ratio 1.5 with A = -2:
    # min(-3, -2.4) = -3, not clipped. Ratio 0.5 with A = 2: min(1, 1.6) = 1, not clipped.
    # Ratio 0.5 with A = -2: min(-1, -1.6) = -1.6, clipped. Ratio 1: A itself.
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 0.7])
    loss, clipped = clipped_surrogate(ratio.log(), advantages, 0.8, 1.2)
    torch.testing.assert_close(loss, torch.tensor([-2.4, 3.0, -1.0, 1.6, -0.7]))
    assert clipped.tolist() == [1, 0, 0, 1, 0]


def test_a_higher_upper_bound_by_hand():
    # DAPO's 0.2 and 0.28: ratio 1.25 with A = 2 is kept whole, 1.5 counts as 1.28; 0.7 with A = -2
    # counts as 0.8, as ever.
    ratio = torch.tensor([1.25, 1.5, 0.7])
    bounds = LossConfig(clip_ratio_high=0.28).clip_bounds
    loss, clipped = clipped_surrogate(ratio.log(), torch.tensor([2.0, 2.0, -2.0]), *bounds)
    torch.testing.assert_close(loss, torch.tensor([-2.5, -2.56, 1.6]))
    assert clipped.tolist() == [0, 1, 1]


def test_a_vanished_token_cannot_make_the_loss_infinite():
    loss, _ = clipped_surrogate(torch.tensor([1e4]), torch.tensor([-1.0]), 0.8, 1.2)
    assert math.isfinite(loss.item())


def test_k3_by_hand():
    # d = log ref - log p = log 2: 2 - log 2 - 1; equal policies: 0.
    value = kl_k3(torch.tensor([-1.0, -3.0]), torch.tensor([-1.0 + math.log(2), -3.0]))
    torch.testing.assert_close(value, torch.tensor([1 - math.log(2), 0.0]))


@given(st.integers(2, 6), st.integers(0, 10**6))
def test_k3_is_never_negative_and_its_mean_is_the_divergence(size, seed):
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(size, generator=generator).double().softmax(0) for _ in range(2))
    value = kl_k3(p.log(), q.log())
    assert (value >= 0).all()
    torch.testing.assert_close((p * value).sum(), (p * (p / q).log()).sum())


def test_the_whole_loss_by_hand():
    # Two tokens of weight 1/2, ratio 1 (on-policy), A = 1 and -3, k3 = 1 - log 2 and 0, H = 2, 4.
    # loss = (-1 + 3) / 2 + 0.1 (1 - log 2) / 2 - 0.01 (2 + 4) / 2
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = LossInputs(
        weights=torch.tensor([0.5, 0.5]),
        advantages=torch.tensor([1.0, -3.0]),
        old_log_probs=None,
        ref_log_probs=torch.tensor([-1.0 + math.log(2), -2.0]),
        rollout_is_weights=None,
        counts=torch.tensor([1, 1]),
    )
    config = LossConfig(kl_coef=0.1, entropy_coef=0.01)
    loss, sums = policy_loss(TokenScores(log_probs, torch.tensor([2.0, 4.0]), None), inputs, config)
    expected = 1.0 + 0.05 * (1 - math.log(2)) - 0.03
    assert loss.item() == pytest.approx(expected)
    values = dict(zip(METRICS, sums.tolist(), strict=True))
    assert values["loss"] == pytest.approx(expected)
    assert values["kl"] == pytest.approx(1 - math.log(2))
    assert (values["entropy"], values["clip_fraction"], values["tokens"]) == (6.0, 0.0, 2.0)
    loss.backward()
    # d/dlogp of -A ratio is -A; of k3, with d = log 2, it is 1 - exp(d) = -1.
    torch.testing.assert_close(log_probs.grad, torch.tensor([-0.5 - 0.05, 1.5]))


GSPO = LossConfig(
    loss_mode="gspo",
    loss_agg_mode="seq-mean-token-mean",
    clip_ratio_low=0.5,
    clip_ratio_high=0.75,
)


def gspo_inputs(old):
    """Two sequences of 2 and 1 tokens, A = 3 and -1, weights 1 / (2 * own tokens)."""
    return LossInputs(
        weights=torch.tensor([0.25, 0.25, 0.5]),
        advantages=torch.tensor([3.0, 3.0, -1.0]),
        old_log_probs=old,
        ref_log_probs=None,
        rollout_is_weights=None,
        counts=torch.tensor([2, 1]),
    )


def test_gspo_by_hand():
    # Token ratios 4 and 1 make sqrt(4 * 1) = 2 of the first sequence, which counts as 1.75; the
    # second one's ratio 0.6 is within [0.5, 1.75]. J = (3 * 1.75 - 0.6) / 2.
    log_probs = torch.zeros(3, requires_grad=True)
    ratio = torch.tensor([4.0, 1.0, 0.6])
    loss, sums = policy_loss(
        TokenScores(log_probs, torch.zeros(3), None), gspo_inputs(-ratio.log()), GSPO
    )
    assert loss.item() == pytest.approx(-(3 * 1.75 - 0.6) / 2)
    assert sums[METRICS.index("clip_fraction")] == 2
    loss.backward()
    # Nothing flows through the clip; d s / d log p = s / own tokens = 0.6 for the second.
    torch.testing.assert_close(log_probs.grad, torch.tensor([0.0, 0.0, 0.3]))


def test_the_gradient_of_gspo_by_hand():
    # Ratios 2 and 1/2 make 1: dJ / d log p_t = A s / (2 sequences * own tokens) for each token.
    log_probs = torch.zeros(3, requires_grad=True)
    old = -torch.tensor([2.0, 0.5, 1.0]).log()
    policy_loss(TokenScores(log_probs, torch.zeros(3), None), gspo_inputs(old), GSPO)[0].backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([-0.75, -0.75, 0.5]))


@given(st.lists(st.lists(st.floats(-3, 3), max_size=5), max_size=5))
def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens(sequences):
    counts = torch.tensor([len(values) for values in sequences], dtype=torch.int64)
    flat = torch.tensor([value for values in sequences for value in values])
    expected = [sum(values) / len(values) for values in sequences for _ in values]
    found = sequence_log_ratio(flat, counts)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=flat.dtype))


def test_weights_of_importance_sampling_scale_the_surrogate_and_nothing_else():
    # On-policy, A = 2, weights 0.5 and 1.5, k3 = 1 - log 2 for both: -(1 + 3) / 2 + 0.1 k3.
    log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    inputs = LossInputs(
        weights=torch.tensor([0.5, 0.5]),
        advantages=torch.tensor([2.0, 2.0]),
        old_log_probs=None,
        ref_log_probs=log_probs.detach() + math.log(2),
        rollout_is_weights=torch.tensor([0.5, 1.5]),
        counts=torch.tensor([2]),
    )
    config = LossConfig(kl_coef=0.1)
    loss, _ = policy_loss(TokenScores(log_probs, torch.zeros(2), None), inputs, config)
    assert loss.item() == pytest.approx(-2 + 0.1 * (1 - math.log(2)))
    loss.backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([-0.5 - 0.05, -1.5 - 0.05]))
    same = replace(inputs, rollout_is_weights=torch.ones(2))
    without = replace(inputs, rollout_is_weights=None)
    values = [
        policy_loss(TokenScores(log_probs, torch.zeros(2), None), item, config)[0]
        for item in (same, without)
    ]
    assert values[0] == values[1]


def test_the_clipped_value_loss_by_hand():
    # Returns 1, clip 0.2. 0.5 from 0 is held at 0.2: (0.2 - 1)^2 > (0.5 - 1)^2. From 0.4 it is
    # within the clip. 1.5 from 1.1 is held at 1.3, and its own error 0.5^2 is the larger.
    values = torch.tensor([0.5, 0.5, 1.5], requires_grad=True)
    inputs = replace(
        gspo_inputs(None), old_values=torch.tensor([0.0, 0.4, 1.1]), returns=torch.ones(3)
    )
    errors = value_loss(values, inputs, 0.2)
    torch.testing.assert_close(errors, torch.tensor([0.64, 0.25, 0.25]) / 2)
    errors.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -0.5, 0.5]))
    with pytest.raises(TypeError, match="returns"):
        value_loss(values, gspo_inputs(None), 0.2)


def test_the_critic_adds_its_loss_to_that_of_the_policy():
    # On-policy with A = 3, 3, -1 and weights 1/4, 1/4, 1/2: -(1.5 - 0.5). 0 is 2 from 2: 2 each.
    inputs = replace(gspo_inputs(None), old_values=torch.zeros(3), returns=torch.full((3,), 2.0))
    scores = TokenScores(torch.zeros(3), torch.zeros(3), torch.zeros(3))
    loss, sums = policy_loss(scores, inputs, LossConfig(critic=True, vf_coef=0.5))
    assert loss.item() == pytest.approx(-1 + 0.5 * 2)
    assert sums[METRICS.index("value_loss")] == 6
    assert sums[METRICS.index("tokens")] == 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss_mode": "gspo"}, "gspo needs loss_agg_mode seq-mean-token-mean, not token-mean"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "needs loss_scale_factor"),
        ({"clip_ratio_high": 0.0}, "clip_ratio_high must be greater than 0"),
        ({"clip_ratio_low": -0.1}, "clip_ratio_low must be greater than 0"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        LossConfig(**values)


def sample(mask):
    return TrainSample([1], [2] * len(mask), list(mask), [0.0] * len(mask))


def test_token_weights_by_hand():
    # Loss tokens 1, 3 and 0: 4 tokens in 2 sequences.
    samples = [sample([1, 0]), sample([1, 1, 1]), sample([0, 0])]
    sizes = loss_sizes(samples)
    assert sizes.tolist() == [4, 2]
    assert token_weight(LossConfig(loss_agg_mode="token-mean"), 3, sizes) == 1 / 4
    assert token_weight(LossConfig(loss_agg_mode="seq-mean-token-mean"), 3, sizes) == 1 / 6
    assert token_weight(LossConfig(loss_agg_mode="seq-mean-token-mean"), 1, sizes) == 1 / 2
    assert token_weight(LossConfig(loss_agg_mode="seq-mean-token-sum"), 3, sizes) == 1 / 2
    dr_grpo = LossConfig(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=10)
    assert token_weight(dr_grpo, 3, sizes) == token_weight(dr_grpo, 1, sizes) == 1 / 20


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8))
def test_means_weigh_one_in_all(masks):
    samples = [sample(mask) for mask in masks]
    sizes = loss_sizes(samples)
    for mode in ("token-mean", "seq-mean-token-mean"):
        config = LossConfig(loss_agg_mode=mode)
        total = sum(sum(m) * token_weight(config, sum(m), sizes) for m in masks if any(m))
        assert total == pytest.approx(1.0 if sizes[0] else 0.0)
