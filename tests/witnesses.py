"""What stock engines answer on models that a run saved: witnesses that know nothing of MiniRL.

    python tests/witnesses.py DIRECTORY...

Prints JSON: for each directory the greedy tokens and their log-probs of a vLLM started on it, and
of a plain transformers forward.
"""

import json
import os
import sys
from typing import Any

from rl_core.trajectory import GenerateRequest, SamplingParams

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42], [17] * 12, [60, 3, 22, 31, 9, 14, 70], [8], [33, 12]]
LENGTH = 16
TOLERANCE = 1e-4
SERVED = "served.json"
"""File in the run directory with what the run's own engine answered in the end."""
FLIPPED = "model.layers.1.self_attn.qkv_proj.weight"
"""Run-time tensor of the engine in which a bit is flipped."""
ABORT = "--abort-a-member=true"
"""Argument of the run that ends with a member that native code aborts."""
ONE_AT_FIRST = "rollout.min_replicas=1"
"""Argument of the run whose second replica comes late."""

Answers = list[tuple[list[int], list[float]]]


def requests() -> list[GenerateRequest]:
    """The same questions, for the run's engine."""
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    return [GenerateRequest(str(n), prompt, sampling) for n, prompt in enumerate(PROMPTS)]


def fresh_vllm(directory: str) -> Answers:
    """Of a stock vLLM."""
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams

    llm = LLM(
        directory,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
    )
    sampling = VllmSamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
    return [
        (
            list(out.token_ids),
            [at[token].logprob for token, at in zip(out.token_ids, out.logprobs, strict=True)],
        )
        for out in outputs
    ]


def transformers(directory: str) -> Answers:
    """Of transformers, token by token, without a cache."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        tokens, log_probs = list(prompt), []
        for _ in range(LENGTH):
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            token = int(logits.argmax())
            log_probs.append(float(logits.log_softmax(-1)[token]))
            tokens.append(token)
        answers.append((tokens[len(prompt) :], log_probs))
    return answers


def main() -> None:
    """Answer for every directory named."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_OMP_THREADS_BIND="nobind")
    witnesses = {"fresh vLLM": fresh_vllm, "transformers": transformers}
    found: dict[str, Any] = {
        directory: {name: ask(directory) for name, ask in witnesses.items()}
        for directory in sys.argv[1:]
    }
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # vLLM's engines end with the process
