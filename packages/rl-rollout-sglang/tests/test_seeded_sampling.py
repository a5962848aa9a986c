"""Seeded sampling follows the distribution, and depends on a row's own seed and position only."""

from types import SimpleNamespace

import torch

from rl_rollout_sglang import cpu_plugin
from rl_rollout_sglang.seeded_sampling import multinomial_with_seed, uniform
from rl_rollout_sglang.server_env import ENGINE_SEED

PROBS = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])


def sample(count, seeds=None, positions=None):
    rows = PROBS.log().expand(count, -1)
    seeds = torch.arange(count) if seeds is None else seeds
    return multinomial_with_seed(rows, seeds, positions or torch.zeros(count).long()).view(-1)


def test_frequencies_are_the_probabilities():
    count = 40_000
    found = torch.bincount(sample(count), minlength=5) / count
    assert found[1] == 0
    assert torch.allclose(found, PROBS, atol=0.01)


def test_positions_of_one_seed_are_independent():
    count = 40_000
    rows = PROBS.log().expand(count, -1)
    found = multinomial_with_seed(rows, torch.full((count,), -7), torch.arange(count)).view(-1)
    assert torch.allclose(torch.bincount(found, minlength=5) / count, PROBS, atol=0.01)
    pairs = torch.bincount(found[:-1] * 5 + found[1:], minlength=25).view(5, 5) / count
    assert torch.allclose(pairs, PROBS[:, None] * PROBS, atol=0.01)


def test_a_row_does_not_depend_on_the_others():
    together = sample(50)
    backward = sample(50, torch.arange(50).flip(0)).flip(0)
    alone = torch.stack([sample(1, torch.tensor([seed]))[0] for seed in range(50)])
    assert torch.equal(together, backward)
    assert torch.equal(together, alone)


def test_extreme_seeds_are_taken():
    values = uniform(torch.tensor([2**63 - 1, -(2**63), 0]), torch.tensor([0, 1, 2**40]))
    assert ((values >= 0) & (values < 1)).all()
    assert len(set(values.tolist())) == 3


def test_weights_need_not_be_normalised_and_large_vocabularies_are_exact():
    rows = torch.full((1, 50_000), -torch.inf)
    rows[0, 49_999] = -30.0
    assert multinomial_with_seed(rows, torch.tensor([1]), torch.tensor([1])).item() == 49_999


def test_requests_without_a_seed_follow_the_engines(monkeypatch):
    """Each its own, the same again in an engine of the same `seed`."""

    def seeds(engine, given=None):
        monkeypatch.setenv(ENGINE_SEED, engine)
        sampling = SimpleNamespace(sampling_seed=given)
        requests = [SimpleNamespace(rid=rid, sampling_params=sampling) for rid in ("a", "b")]
        return [cpu_plugin._seed(request) for request in requests]

    assert seeds("0") == seeds("0")
    assert len({*seeds("0"), *seeds("1")}) == 4
    assert seeds("0", given=5) == seeds("1", given=5) == [5, 5]
