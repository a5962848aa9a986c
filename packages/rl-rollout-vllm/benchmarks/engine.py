"""Measures start, weight sync, generation and shutdown of one replica on random weights.

    python packages/rl-rollout-vllm/benchmarks/engine.py --size small --dtype bfloat16

Prints one line a figure. Everything runs on this machine; nothing is downloaded.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rl_core.deadlines import Deadline
from rl_core.interfaces import BucketLease, LeasedTensor, Placement
from rl_core.metadata import Manifest
from rl_core.testing.launcher import ProcessLauncher
from rl_core.torch import meta_of
from rl_core.trajectory import GenerateRequest, SamplingParams
from rl_core.versions import PolicyVersion
from rl_rollout_vllm.adapter import VllmAdapter
from rl_rollout_vllm.config import VllmConfig
from rl_rollout_vllm.replica import VllmReplica

SIZES = {"tiny": (256, 8), "small": (64, 32)}
"""Requests and tokens of a batch: the embedded model's step, and SmolLM2-135M's."""

CALL_S = 300.0


def make_model(size: str) -> torch.nn.Module:
    """The embedded model's architecture (1M parameters), or that of SmolLM2-135M."""
    torch.manual_seed(0)
    if size == "tiny":
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=80,
                hidden_size=192,
                intermediate_size=512,
                num_hidden_layers=2,
                num_attention_heads=6,
                num_key_value_heads=2,
                head_dim=32,
                max_position_embeddings=256,
                tie_word_embeddings=False,
            )
        )
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
    )


@contextmanager
def timed(times: list[float]) -> Iterator[None]:
    """Append the seconds that the block took."""
    started = time.perf_counter()
    yield
    times.append(time.perf_counter() - started)


def say(what: str, times: list[float], amount: float = 0.0, unit: str = "") -> None:
    """One line: median, range, and a rate."""
    middle = median(times)
    rate = f"  {amount / middle:8.1f} {unit}" if amount else ""
    sys.stdout.write(f"{what:32s} {middle:7.3f} s ({min(times):.3f}-{max(times):.3f}){rate}\n")
    sys.stdout.flush()


def sync(adapter: VllmAdapter, lent: list[LeasedTensor], step: int) -> None:
    """Load and commit one version."""
    manifest = Manifest(PolicyVersion(1, step), tuple(item.meta for item in lent))
    adapter.update_weights(iter([BucketLease(lent)]), manifest, Deadline.after(CALL_S))
    adapter.commit(manifest.version, CALL_S)


def batch(size: str, round_number: int) -> list[GenerateRequest]:
    """Seeded requests, different in every round."""
    count, tokens = SIZES[size]
    return [
        GenerateRequest(
            f"{round_number}.{index}",
            [5 + index % 7, 6, 7, 8],
            SamplingParams(max_tokens=tokens, seed=round_number * count + index, ignore_eos=True),
        )
        for index in range(count)
    ]


def main() -> None:
    """Run all measurements for one size and dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--packed", action="store_true", help="vLLM's packed linear weights")
    parser.add_argument("--start-method", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        model = make_model(options.size)
        model.save_pretrained(path)
        lent = [LeasedTensor(meta_of(n, p.data), p.data) for n, p in model.named_parameters()]
        config = VllmConfig(
            local_path=path,
            dtype=options.dtype,
            max_model_len=128,
            bucket_megabytes=64,
            cpu_packed_weights=options.packed,
            start_method=options.start_method,
            log_dir=str(Path(path) / "logs"),
        )
        measure(VllmReplica(config, ProcessLauncher(), Placement()), config, lent, options)


def measure(
    replica: VllmReplica,
    config: VllmConfig,
    lent: list[LeasedTensor],
    options: argparse.Namespace,
) -> None:
    """Start, sync, generate, release, end."""
    starts: list[float] = []
    syncs: list[float] = []
    batches: list[float] = []
    ends: list[float] = []
    with timed(starts):
        replica.start(Deadline.after(CALL_S))
    say("start", starts)
    adapter = VllmAdapter(replica.server, 0, config)
    for step in range(options.rounds):
        with timed(syncs):
            sync(adapter, lent, step)
        requests = batch(options.size, step)
        with timed(batches):
            adapter.generate(requests, CALL_S)
    nbytes = sum(item.meta.nbytes for item in lent)
    count, tokens = SIZES[options.size]
    say(f"sync of {nbytes / 1e6:.0f} MB", syncs, nbytes / 1e9, "GB/s")
    say(f"generate {count} x {tokens}", batches, count * tokens, "tokens/s")
    with timed(ends):
        replica.shutdown(60)
    say("shutdown", ends)


if __name__ == "__main__":
    main()
