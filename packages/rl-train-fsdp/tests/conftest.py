"""Tiny models, and a pool of rank processes that run engine calls."""

import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
import transformers

from rl_core.testing.property_tests import no_time_limits
from rl_core.trajectory import TrainSample

no_time_limits()

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The rank processes are shared by all modules here: one worker runs their tests."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.xdist_group("rl-train-fsdp"))


def make_config(kind, **changes):
    """A transformers config: `dense`, `tied`, `moe`, `llama`, `gemma2` or `mamba`."""
    match kind:
        case "dense" | "tied":
            settings = {**TINY, "tie_word_embeddings": kind == "tied", **changes}
            return transformers.Qwen3Config(**settings)
        case "moe":
            moe = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
            return transformers.Qwen3MoeConfig(**{**TINY, **moe, **changes})
        case "llama":
            return transformers.LlamaConfig(**{**TINY, "attention_bias": True, **changes})
        case "gemma2":
            extra = {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}
            return transformers.Gemma2Config(**{**TINY, **extra, **changes})
        case "mamba":
            shape = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 61}
            return transformers.MambaConfig(**{**shape, **changes})
    raise ValueError(kind)


def save_model(path, config, seed=0, dtype=torch.float32):
    """A random model in an HF directory."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(path)
    return path


@pytest.fixture(name="make_config")
def make_config_fixture():
    """`make_config(kind, **changes)`."""
    return make_config


@pytest.fixture(name="free_port")
def free_port_fixture():
    """`free_port()`."""
    return free_port


@pytest.fixture(scope="session", name="save_model")
def save_model_fixture():
    """`save_model(path, config, seed, dtype)`."""
    return save_model


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Directories of tiny models by kind, made on demand."""
    root = tmp_path_factory.mktemp("models")

    def get(kind, **options):
        changes = options.pop("config", {})
        name = "-".join([kind, *map(str, options.items()), *map(str, changes.items())])
        path = root / "".join(c if c.isalnum() else "_" for c in name)
        if not path.exists():
            save_model(path, make_config(kind, **changes), **options)
        return path

    return get


class RankPool:
    """Rank processes; `run` makes them one process group for one script."""

    def __init__(self, root):
        self._root = root
        self._count = 0
        self._processes = []

    def run(self, world, config, calls, *, deadline=60.0, device="cpu"):
        """Results of each rank. `calls` is one list for all ranks, or a function of the rank."""
        outcomes = self.outcomes(world, config, calls, deadline=deadline, device=device)
        for outcome in outcomes:
            if outcome["error"] is not None:
                pytest.fail(outcome["trace"], pytrace=False)
        return [outcome["results"] for outcome in outcomes]

    def outcomes(self, world, config, calls, *, deadline=60.0, device="cpu"):
        """Like `run`, with what each rank raised."""
        self._start(world)
        self._count += 1
        port = free_port()
        files = []
        for rank in range(world):
            work = self._root / f"{self._count}-{rank}.in"
            out = self._root / f"{self._count}-{rank}.out"
            place = {"rank": rank, "world_size": world, "local_rank": rank, "device": device}
            mine = calls(rank) if callable(calls) else calls
            content = {"place": {**place, "master_port": port}, "config": config, "calls": mine}
            torch.save(content, work)
            self._send(rank, {"work": str(work), "out": str(out)})
            files.append(out)
        until = time.monotonic() + deadline
        for rank in range(world):
            self._expect(rank, "done", until)
        return [torch.load(file, weights_only=False) for file in files]

    def _start(self, world):
        fresh = range(len(self._processes), world)
        for _ in fresh:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, str(Path(__file__).with_name("ranks.py"))]
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._processes.append(process)
        for rank in fresh:
            self._expect(rank, "ready", time.monotonic() + 120.0)

    def _send(self, rank, job):
        self._processes[rank].stdin.write(json.dumps(job) + "\n")
        self._processes[rank].stdin.flush()

    def _expect(self, rank, word, until):
        stream = self._processes[rank].stdout
        while True:
            ready, _, _ = select.select([stream], [], [], max(0.0, until - time.monotonic()))
            line = stream.readline().strip() if ready else ""
            if line == word:
                return
            if not line:
                self.close()
                pytest.fail(f"rank {rank} did not say {word!r} in time")

    def close(self):
        """End all ranks."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []


def free_port():
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """The pool, started on first use."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture
def make_samples():
    """`make(count, seed=...)`: random samples of uneven lengths, some tokens masked.

    `make.for_critic(count, ...)`: the same with values and returns.
    """

    def make(count, *, seed=0, old=False, ref=False, temperature=1.0, vocab=61):
        rnd = random.Random(seed)
        return [_sample(rnd, old, ref, temperature, vocab) for _ in range(count)]

    def make_for_critic(count, **options):
        rnd = random.Random(1)
        return [
            msgspec.structs.replace(
                sample,
                old_values=[rnd.uniform(-0.3, 0.3) for _ in sample.response_ids],
                returns=[rnd.uniform(-1, 1) for _ in sample.response_ids],
            )
            for sample in make(count, **options)
        ]

    make.for_critic = make_for_critic
    return make


def _sample(rnd, old, ref, temperature, vocab):
    length = rnd.randint(1, 9)
    mask = [int(rnd.random() < 0.8) for _ in range(length)]
    return TrainSample(
        prompt_ids=[rnd.randrange(vocab) for _ in range(rnd.randint(1, 9))],
        response_ids=[rnd.randrange(vocab) for _ in range(length)],
        loss_mask=mask,
        advantages=[rnd.uniform(-1, 1)] * length,
        old_log_probs=[rnd.uniform(-6, -3) for _ in range(length)] if old else None,
        ref_log_probs=[rnd.uniform(-6, -3) for _ in range(length)] if ref else None,
        temperature=temperature,
    )


@pytest.fixture
def settings():
    """`make(path, engine={...}, ...)`: the nested mapping of an engine's configuration."""

    def make(path, world=1, **sections):
        engine = {"dtype": "float32", "fsdp_size": world, "timeout_s": 20.0}
        return {
            "model": {"local_path": str(path)},
            "engine": {**engine, **sections.pop("engine", {})},
            **sections,
        }

    return make
