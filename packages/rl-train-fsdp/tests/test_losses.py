import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.trajectory import TrainSample
from rl_train_fsdp.config import LossConfig
from rl_train_fsdp.losses import METRICS, LossInputs, clipped_surrogate, kl_k3, policy_loss
from rl_train_fsdp.mini_batches import loss_sizes, token_weight


def test_the_clipped_surrogate_by_hand():
    # eps 0.2. Ratio 1.5 with A = 2: min(3, 2.4) = 2.4 is kept, clipped. Ratio 1.5 with A = -2:
    # min(-3, -2.4) = -3, not clipped. Ratio 0.5 with A = 2: min(1, 1.6) = 1, not clipped.
    # Ratio 0.5 with A = -2: min(-1, -1.6) = -1.6, clipped. Ratio 1: A itself.
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 0.7])
    loss, clipped = clipped_surrogate(ratio.log(), advantages, 0.2)
    torch.testing.assert_close(loss, torch.tensor([-2.4, 3.0, -1.0, 1.6, -0.7]))
    assert clipped.tolist() == [1, 0, 0, 1, 0]


def test_a_vanished_token_cannot_make_the_loss_infinite():
    loss, _ = clipped_surrogate(torch.tensor([1e4]), torch.tensor([-1.0]), 0.2)
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
    )
    config = LossConfig(kl_coef=0.1, entropy_coef=0.01)
    loss, sums = policy_loss(log_probs, torch.tensor([2.0, 4.0]), inputs, config)
    expected = 1.0 + 0.05 * (1 - math.log(2)) - 0.03
    assert loss.item() == pytest.approx(expected)
    values = dict(zip(METRICS, sums.tolist(), strict=True))
    assert values["loss"] == pytest.approx(expected)
    assert values["kl"] == pytest.approx(1 - math.log(2))
    assert (values["entropy"], values["clip_fraction"], values["tokens"]) == (6.0, 0.0, 2.0)
    loss.backward()
    # d/dlogp of -A ratio is -A; of k3, with d = log 2, it is 1 - exp(d) = -1.
    torch.testing.assert_close(log_probs.grad, torch.tensor([-0.5 - 0.05, 1.5]))


def sample(mask):
    return TrainSample([1], [2] * len(mask), list(mask), [0.0] * len(mask))


def test_token_weights_by_hand():
    # Loss tokens 1, 3 and 0: 4 tokens in 2 sequences.
    samples = [sample([1, 0]), sample([1, 1, 1]), sample([0, 0])]
    sizes = loss_sizes(samples)
    assert sizes.tolist() == [4, 2]
    assert token_weight("token-mean", 3, sizes) == 1 / 4
    assert token_weight("seq-mean-token-mean", 3, sizes) == 1 / 6
    assert token_weight("seq-mean-token-mean", 1, sizes) == 1 / 2
    assert token_weight("seq-mean-token-sum", 3, sizes) == 1 / 2


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8))
def test_means_weigh_one_in_all(masks):
    samples = [sample(mask) for mask in masks]
    sizes = loss_sizes(samples)
    for mode in ("token-mean", "seq-mean-token-mean"):
        total = sum(sum(m) * token_weight(mode, sum(m), sizes) for m in masks if any(m))
        assert total == pytest.approx(1.0 if sizes[0] else 0.0)
