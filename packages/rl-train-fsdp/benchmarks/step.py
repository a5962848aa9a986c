"""Seconds of one training step (log-probs, update, stream) on two cpu ranks, random weights.

`python benchmarks/step.py tiny` or `smollm2`; see `--help`. Ranks are processes of this program.
"""

import argparse
import dataclasses
import itertools
import multiprocessing
import random
import socket
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch
import transformers

from rl_core.interfaces import RankPlace
from rl_core.plugins import build_config
from rl_core.trajectory import TrainSample
from rl_train_fsdp.config import FsdpConfig
from rl_train_fsdp.engine import FsdpTrainEngine


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the lengths of its samples."""

    model: transformers.PretrainedConfig
    prompt: int
    response: int


CASES = {
    "tiny": Case(
        transformers.Qwen3Config(
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=128,
            tie_word_embeddings=True,
        ),
        prompt=12,
        response=8,
    ),
    "smollm2": Case(
        transformers.LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            tie_word_embeddings=True,
        ),
        prompt=40,
        response=16,
    ),
}


def make_samples(case: Case, count: int, group: int, seed: int) -> list[TrainSample]:
    """Random tokens of the case's lengths; `group` samples have a prompt in common."""
    rnd = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [rnd.randrange(case.model.vocab_size) for _ in range(length)]

    size = case.response
    prompts = [tokens(case.prompt) for _ in range(-(-count // group))]
    return [
        TrainSample(prompts[number // group], tokens(size), [1] * size, [rnd.uniform(-1, 1)] * size)
        for number in range(count)
    ]


def run_rank(place: RankPlace, options: argparse.Namespace, path: str) -> None:
    """One rank; rank 0 says how long each phase took."""
    sections = {
        "model": {"local_path": path},
        "engine": {"fsdp_size": place.world_size, "dtype": options.dtype},
        "loss": {"ppo_mini_batch_size": max(1, options.samples // options.mini_batches)},
    }
    engine = FsdpTrainEngine(build_config(FsdpConfig, sections, "actor"), place)
    engine.initialize()
    count = options.samples // place.world_size
    samples = make_samples(CASES[options.case], count, options.group, place.rank)
    for _ in range(options.steps):
        marks = [time.perf_counter()]
        scores = engine.compute_log_prob(samples)
        marks.append(time.perf_counter())
        scored = [
            msgspec.structs.replace(sample, old_log_probs=score.log_probs)
            for sample, score in zip(samples, scores, strict=True)
        ]
        engine.update_policy(scored)
        marks.append(time.perf_counter())
        for _meta, _tensor in engine.get_per_tensor_param():
            pass
        marks.append(time.perf_counter())
        if place.rank == 0:
            seconds = [after - before for before, after in itertools.pairwise(marks)]
            line = "log_prob_s={:.3f} update_s={:.3f} stream_s={:.3f}\n".format(*seconds)
            sys.stdout.write(line)
            sys.stdout.flush()
    engine.shutdown()


def main() -> None:
    """Make the model, start the ranks, wait for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--samples", type=int, default=256, help="of all ranks, per step")
    parser.add_argument("--group", type=int, default=1, help="samples of one prompt")
    parser.add_argument("--mini-batches", type=int, default=2, help="optimizer steps of an update")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        torch.manual_seed(0)
        config = CASES[options.case].model
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
        context = multiprocessing.get_context("spawn")
        places = [
            RankPlace(rank, options.ranks, rank, "127.0.0.1", port) for rank in range(options.ranks)
        ]
        ranks = [context.Process(target=run_rank, args=(p, options, path)) for p in places]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    sys.exit(max(abs(rank.exitcode or 0) for rank in ranks))


if __name__ == "__main__":
    main()
