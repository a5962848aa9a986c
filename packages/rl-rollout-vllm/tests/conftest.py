"""Tiny random models, and real vLLM engines that are started once for the whole run."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch

from rl_core.interfaces import Placement
from rl_core.plugins import load_object
from rl_core.rollout.expected_digests import expected_digests
from rl_core.rollout.live_check import check_live
from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.process_holdings import private_bytes
from rl_core.testing.property_tests import no_time_limits
from rl_core.testing.rollout_contract import RolloutUnderTest
from rl_core.testing.started_replica import CALL_S, StartedReplica, StartedReplicas
from rl_core.testing.weight_set import WeightSet
from rl_core.trajectory import GenerateRequest
from rl_core.versions import PolicyVersion
from rl_rollout_vllm import ROLLOUT_BACKEND
from rl_rollout_vllm.config import VllmConfig
from rl_rollout_vllm.replica import VllmReplica

no_time_limits()

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # these engines share the cores
KINDS = ("dense", "tied", "moe")
PROMPTS = ([5, 6, 7, 8], [40, 41], [9, 9, 30, 12, 13, 70, 4])
EOS_ID = 2
HERE = Path(__file__).parent
WHOLE_RUN = 200
"""A run of more tests than this needs all engines."""
SHAPE = {
    "vocab_size": 80,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the CPU attention kernel takes multiples of 32
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The engines are shared by all modules here: one worker runs their tests."""
    for item in items:
        if item.path.parent == HERE and item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.xdist_group("vllm-engines"))


def make_model(kind, seed):
    """A random model: Llama with biases; as MiniRL's embedded model, but tied; with experts."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(seed)
    if kind == "moe":
        config = Qwen3MoeConfig(
            **SHAPE,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
            tie_word_embeddings=False,
        )
        model = Qwen3MoeForCausalLM(config)
    elif kind == "tied":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))
    else:
        biases = {"attention_bias": True, "mlp_bias": True}
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, **biases, tie_word_embeddings=False))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones in every fresh model, so that a swapped norm would not show
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.float().eval()


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory):
    """Directories of models A and B of every kind."""
    root = tmp_path_factory.mktemp("models")
    found = {}
    for kind in KINDS:
        found[kind] = [root / f"{kind}-a", root / f"{kind}-b"]
        for seed, path in enumerate(found[kind]):
            make_model(kind, seed).save_pretrained(path)
    return found


@pytest.fixture(scope="session")
def weight_sets(model_dirs):
    """The weights of models A and B of every kind, as a trainer publishes them."""
    from safetensors.torch import load_file

    return {
        kind: [_weight_set(kind, load_file(path / "model.safetensors")) for path in paths]
        for kind, paths in model_dirs.items()
    }


def _weight_set(kind, tensors):
    tensors = {name: tensors[name].clone() for name in sorted(tensors)}
    aliases = {"model.embed_tokens.weight": ("lm_head.weight",)} if kind == "tied" else {}
    return WeightSet(tensors, aliases)


class Started(StartedReplica):
    """One running replica with its adapters."""

    def __init__(self, path, log_dir, tp_size=1, **settings):
        config = VllmConfig(
            local_path=str(path),
            dtype="float32",
            tensor_model_parallel_size=tp_size,
            kv_cache_memory_gb=0.0625,
            bucket_megabytes=0.05,
            log_dir=str(log_dir),
            **settings,
        )
        placement = Placement(tp_size=tp_size)
        replica = VllmReplica(config, ProcessLauncher(log_dir), placement)
        super().__init__(ROLLOUT_BACKEND, replica, config)


ENGINES = {
    "dense": {},
    "moe": {},
    "tied": {"tp_size": 2, "cpu_packed_weights": True},
}
"""The engines that are started: every kind of model once."""


@pytest.fixture(scope="session")
def engines(request, model_dirs, tmp_path_factory):
    """One engine for every kind of model."""
    logs = {kind: tmp_path_factory.mktemp(f"{kind}-logs") for kind in KINDS}

    def start(kind):
        return Started(model_dirs[kind][0], logs[kind], **ENGINES[kind])

    engines = StartedReplicas(start)
    if len(request.session.items) > WHOLE_RUN:
        engines.prepare(*KINDS)
    yield engines
    engines.end()


@pytest.fixture(scope="session")
def save():
    """Writes weights as a Hugging Face directory."""
    from safetensors.torch import save_file

    def save(weights, path):
        file = path / "model.safetensors"
        save_file(dict(weights.tensors), file, metadata={"format": "pt"})

    return save


@pytest.fixture(scope="session")
def prompts():
    """What is asked."""
    return PROMPTS


@pytest.fixture(scope="session")
def ask():
    """Completions of all prompts (or of those given) under one sampling."""
    numbers = itertools.count()

    def ask(started, sampling, prompts=PROMPTS):
        requests = [
            GenerateRequest(f"ask-{next(numbers)}", list(prompt), sampling) for prompt in prompts
        ]
        return started.adapters[0].generate(requests, CALL_S)

    return ask


@pytest.fixture(scope="session")
def under_test(engines, weight_sets, save):
    """What the contract kit wants to know of a replica."""

    def make(kind):
        started = engines(kind)
        first, second = weight_sets[kind]
        model_config = json.loads(Path(started.config.local_path, "config.json").read_text())
        return RolloutUnderTest(
            started.adapters,
            first,
            second,
            PROMPTS,
            save=save,
            layout=load_object(ROLLOUT_BACKEND.layout)(model_config, started.config),
            flip=lambda *what: started.worker("rl_flip", *what),
            eos_id=EOS_ID,
            long_tokens=300,
            steps=started.steps,
            may_be_deaf=frozenset(name for name in first.tensors if "experts" in name),
            resident=lambda: private_bytes(peer["pid"] for peer in started.state()["workers"]),
            filling=[[(5 + n) % 80] * 1000 for n in range(60)],  # of 65536 tokens
        )

    return make


@pytest.fixture(scope="session")
def live_checks(under_test):
    """What every rank holds, compared with a set of weights."""

    def check(kind, weights):
        given = under_test(kind)
        size = len(given.adapters)
        stream = zip(weights.metas, weights.tensors.values(), strict=True)
        manifest = weights.manifest(PolicyVersion(1, 0))
        expected = expected_digests(stream, manifest, given.layout, range(size), size)
        live = given.adapters[0].live_digests(CALL_S)
        pairs = zip(expected, live, strict=True)
        return [check_live(given.layout, one, found) for one, found in pairs]

    return check
