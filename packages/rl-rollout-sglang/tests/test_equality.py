"""A warm engine answers like a cold one, and like a transformers forward, log-probs included."""

import pytest
import torch

from rl_core.testing.rollout_case import GREEDY
from rl_core.trajectory import SamplingParams

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4


def transformers_log_probs(path, prompt, tokens, sampling):
    """Log-probabilities of `tokens` when sampled so, and the logits; in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logits = logits / (sampling.temperature or 1.0)
    if sampling.top_k > 0:
        logits = TopKLogitsWarper(sampling.top_k)(None, logits)
    if sampling.top_p < 1.0:
        logits = TopPLogitsWarper(sampling.top_p)(None, logits)
    return logits.log_softmax(-1)[range(len(tokens)), tokens], logits


def assert_equal_to_transformers(started, path, prompts, ask):
    for prompt, completion in zip(prompts, ask(started, GREEDY), strict=True):
        tokens = completion.token_ids
        expected, logits = transformers_log_probs(path, prompt, tokens, GREEDY)
        assert logits.argmax(-1).tolist() == tokens
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=TOLERANCE)


@pytest.fixture
def dense_a(engines, weight_sets):
    """The dense engine serving A."""
    started = engines("dense")
    started.sync(weight_sets["dense"][0])
    return started


@pytest.mark.parametrize("kind", ["dense", "moe", "tied"])
def test_answers_are_those_of_transformers(engines, weight_sets, model_dirs, prompts, ask, kind):
    """`tied` has two ranks."""
    started = engines(kind)
    for weights in weight_sets[kind][:2]:
        started.sync(weights)
    assert_equal_to_transformers(started, model_dirs[kind][1], prompts, ask)


@pytest.mark.parametrize("kind", ["moe", "tied"])
def test_a_warm_engine_is_what_a_cold_one_was(engines, weight_sets, ask, kind):
    """Every live tensor of every rank, and the answers; for `dense` the contract asks."""
    started = engines(kind)
    for weights in weight_sets[kind]:
        started.sync(weights)
    assert started.adapters[0].live_digests(60) == started.cold.digests
    for found, (tokens, log_probs) in zip(ask(started, GREEDY), started.cold.answers, strict=True):
        assert found.token_ids == tokens
        assert found.log_probs == pytest.approx(log_probs, abs=TOLERANCE)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(0.7, max_tokens=24, seed=5, ignore_eos=True),
        SamplingParams(0.7, top_k=20, max_tokens=24, seed=5, ignore_eos=True),
        SamplingParams(1.3, top_p=0.8, max_tokens=24, seed=5, ignore_eos=True),
    ],
    ids=["temperature", "top_k", "top_p"],
)
def test_log_probs_are_of_the_distribution_sampled_from(
    dense_a, model_dirs, prompts, ask, sampling
):
    """Temperature and truncation included, which SGLang's plain log-probabilities leave out."""
    path = model_dirs["dense"][0]
    for prompt, completion in zip(prompts, ask(dense_a, sampling), strict=True):
        expected, _ = transformers_log_probs(path, prompt, completion.token_ids, sampling)
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=TOLERANCE)
