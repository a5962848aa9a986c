"""Tiny random models, and real vLLM engines that are started once for the whole run."""

import os

import pytest
import torch

from rl_core.deadlines import Deadline
from rl_core.interfaces import Placement
from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.rollout_contract import RolloutUnderTest
from rl_core.testing.summary import pytest_terminal_summary  # noqa: F401
from rl_core.testing.weight_set import WeightSet
from rl_rollout_vllm.adapter import VllmAdapter
from rl_rollout_vllm.config import VllmConfig
from rl_rollout_vllm.replica import VllmReplica

KINDS = ("dense", "tied", "moe")
PROMPTS = ([5, 6, 7, 8], [40, 41], [9, 9, 30, 12, 13, 70, 4])
EOS_ID = 2
START_S = 240.0
SHAPE = {
    "vocab_size": 80,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}


def make_model(kind, seed):
    """A random model of the architecture that the embedded model of MiniRL has."""
    from transformers import (
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
    else:
        config = Qwen3Config(**SHAPE, tie_word_embeddings=kind == "tied")
        model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones in every fresh model, so that a swapped norm would not show
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
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


class Started:
    """One running replica with its adapters."""

    def __init__(self, path, tp_size, log_dir, **settings):
        self.config = VllmConfig(
            local_path=str(path),
            dtype="float32",
            tensor_parallel_size=tp_size,
            kv_cache_memory_gb=0.0625,
            bucket_megabytes=0.05,
            log_dir=str(log_dir),
            **settings,
        )
        self.replica = VllmReplica(
            self.config, ProcessLauncher(log_dir), Placement(tp_size=tp_size)
        )
        self.replica.start(Deadline.after(START_S))
        self.server = self.replica.server
        self.adapters = [VllmAdapter(self.server, rank, self.config) for rank in range(tp_size)]

    def state(self):
        return self.server.call("live_state", timeout=30)


@pytest.fixture(scope="session")
def engines(model_dirs, tmp_path_factory):
    """Starts replicas on demand, each once, and ends them with the run."""
    running = {}

    def start(kind, tp_size=1, **settings):
        key = (kind, tp_size, tuple(sorted(settings.items())))
        if key not in running:
            log_dir = tmp_path_factory.mktemp("logs")
            running[key] = Started(model_dirs[kind][0], tp_size, log_dir, **settings)
        return running[key]

    yield start
    for started in running.values():
        started.replica.shutdown(30)


@pytest.fixture(scope="session")
def under_test(engines, weight_sets):
    """What the contract kit wants to know of a replica."""

    def make(kind, tp_size=1, **settings):
        started = engines(kind, tp_size, **settings)
        first, second = weight_sets[kind]
        return RolloutUnderTest(
            started.adapters,
            first,
            second,
            PROMPTS,
            save=save,
            eos_id=EOS_ID,
            long_tokens=400,
            may_be_deaf=frozenset(name for name in first.tensors if "experts" in name),
        )

    return make


def save(weights, path):
    """Write weights as a Hugging Face directory."""
    from safetensors.torch import save_file

    save_file(dict(weights.tensors), path / "model.safetensors", metadata={"format": "pt"})


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
