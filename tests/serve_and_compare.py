"""Train a little, sync, and ask three witnesses what the engine serves. Prints JSON.

    python tests/serve_and_compare.py DIRECTORY dense|tied|moe TP_SIZE

Witnesses: the engine that got its weights by syncs; a stock vLLM, started afterwards on the saved
directory; transformers on the same directory. Each gives greedy tokens and their log-probs.
"""

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

from minirl.business_log import ConsoleHandler, LogServer, attach
from minirl.config import load_config
from minirl.plan import make_plan
from minirl.process_tree import become_subreaper, end_descendants
from minirl.ray_cluster import ray_session
from minirl.run_output import RunOutput
from minirl.system import RLSystem
from minirl.tiny_model import build_tiny_model
from minirl.worker_process import ProcessSettings
from rl_core.channel import new_key
from rl_core.trajectory import GenerateRequest, SamplingParams, TrainSample
from rl_core.versions import PolicyVersion

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42], [17] * 12, [60, 3, 22, 31, 9, 14, 70], [8], [33, 12]]
LENGTH = 16
SYNCS = 3


def main() -> None:
    directory, kind, tp_size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    model = directory / "model"
    build_tiny_model(model, kind=kind, seed=3)
    saved = directory / "saved"
    served = serve(directory, model, saved, tp_size)
    answers = {"served": served, "fresh": fresh_vllm(saved), "transformers": transformers(saved)}
    sys.stdout.write(json.dumps(answers) + "\n")
    sys.stdout.flush()
    end_descendants(5)
    os._exit(0)


def serve(directory: Path, model: Path, saved: Path, tp_size: int) -> list[Any]:
    """Update and sync a few times; then the engine's answers, and the actor's saved weights."""
    config = load_config(
        [
            f"actor.model_config.local_path={model}",
            f"rollout.tensor_model_parallel_size={tp_size}",
            "rollout.max_completion_length=64",
            "algorithm.ppo_mini_batch_size=2",
        ]
    )
    plan = make_plan(config)
    become_subreaper()
    attach(ConsoleHandler())
    log_server = LogServer(new_key(), None)
    settings = ProcessSettings(str(directory / "logs"), log_server.address)
    with (
        ray_session(config.cluster, plan.device, plan.actor_world),
        RunOutput(directory, config) as output,
    ):
        system = RLSystem(plan, settings)
        try:
            system.start(output, secrets.token_hex(4))
            system.weight_sync.sync(PolicyVersion(1, 0), "initial")
            for step in range(1, SYNCS):
                system.weight_sync.release()
                system.workers.call("update_policy", samples(step), timeout_s=60)
                system.weight_sync.sync(PolicyVersion(1, step), "trained")
            completions = system.rollout.generate(requests())
            system.workers.call("save_pretrained", str(saved), timeout_s=60)
        finally:
            system.shutdown()
    return [[completion.token_ids, completion.log_probs] for completion in completions]


def samples(step: int) -> list[TrainSample]:
    """Arbitrary tokens to learn from, so that every weight moves."""
    return [
        TrainSample(prompt, [step + 4 * n, 9, 30 + n], [1] * 3, advantages=[(-1.0) ** n] * 3)
        for n, prompt in enumerate(PROMPTS[:4])
    ]


def requests() -> list[GenerateRequest]:
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    return [GenerateRequest(str(n), prompt, sampling) for n, prompt in enumerate(PROMPTS)]


def fresh_vllm(saved: Path) -> list[Any]:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams

    llm = LLM(str(saved), dtype="float32", max_model_len=128, enforce_eager=True)
    sampling = VllmSamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [request.outputs[0] for request in llm.generate(prompts, sampling, use_tqdm=False)]
    return [
        [
            list(out.token_ids),
            [at[token].logprob for token, at in zip(out.token_ids, out.logprobs, strict=True)],
        ]
        for out in outputs
    ]


def transformers(saved: Path) -> list[Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        tokens, log_probs = list(prompt), []
        for _ in range(LENGTH):
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            token = int(logits.argmax())
            log_probs.append(float(logits.log_softmax(-1)[token]))
            tokens.append(token)
        answers.append([tokens[len(prompt) :], log_probs])
    return answers


if __name__ == "__main__":
    main()
