"""A warm engine taken to B equals stock vLLM started on B, and a transformers forward.

Both references know nothing of this package.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_core.testing.rollout_case import GREEDY
from rl_core.trajectory import SamplingParams

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def stock(model_dirs, prompts, tmp_path_factory):
    """What stock vLLM answers on model B of every kind."""
    output = tmp_path_factory.mktemp("stock") / "answers.json"
    directories = {kind: str(paths[1]) for kind, paths in model_dirs.items()}
    program = str(Path(__file__).with_name("stock_vllm.py"))
    arguments = [str(output), json.dumps(prompts), *directories.values()]
    done = subprocess.run(
        [sys.executable, program, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(output.read_text())
    return {kind: answers[directory] for kind, directory in directories.items()}


@pytest.fixture(params=["dense", "moe", "tied"])
def warm(request, engines, weight_sets):
    """An engine that served A and was then taken to B; `tied` is packed and has two ranks."""
    kind = request.param
    started = engines(kind)
    for weights in weight_sets[kind]:
        started.sync(weights)
    return kind, started


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


def test_answers_are_those_of_stock_vllm(warm, stock, ask):
    kind, started = warm
    for completion, (tokens, log_probs) in zip(ask(started, GREEDY), stock[kind], strict=True):
        assert completion.token_ids == tokens
        assert completion.log_probs == pytest.approx(log_probs, abs=TOLERANCE)


def test_answers_are_those_of_transformers(warm, model_dirs, prompts, ask):
    kind, started = warm
    for prompt, completion in zip(prompts, ask(started, GREEDY), strict=True):
        tokens = completion.token_ids
        expected, logits = transformers_log_probs(model_dirs[kind][1], prompt, tokens, GREEDY)
        assert logits.argmax(-1).tolist() == tokens
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=TOLERANCE)


@pytest.fixture
def dense_a(engines, weight_sets, model_dirs):
    """The dense engine serving A, and the directory of A."""
    started = engines("dense")
    started.sync(weight_sets["dense"][0])
    return started, model_dirs["dense"][0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, -1, 1), (0.7, 20, 1), (1.3, -1, 0.8)]
)
def test_log_probs_are_of_the_distribution_sampled_from(
    dense_a, prompts, ask, temperature, top_k, top_p
):
    """Temperature and truncation included. Fails with vLLM's default `logprobs_mode`."""
    started, path = dense_a
    sampling = SamplingParams(temperature, top_p, top_k, 24, seed=5, ignore_eos=True)
    for prompt, completion in zip(prompts, ask(started, sampling), strict=True):
        expected, _ = transformers_log_probs(path, prompt, completion.token_ids, sampling)
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=TOLERANCE)
