"""Tiny random models, and a real SGLang engine that is started once for the whole run."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch

from rl_core.deadlines import Deadline
from rl_core.errors import ReplicaFencedError
from rl_core.interfaces import Placement
from rl_core.plugins import load_object
from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.process_holdings import private_bytes
from rl_core.testing.property_tests import no_time_limits
from rl_core.testing.rollout_case import GREEDY
from rl_core.testing.rollout_contract import ColdStart, RolloutUnderTest
from rl_core.testing.started_replica import CALL_S, StartedReplica, StartedReplicas
from rl_core.testing.weight_set import WeightSet
from rl_core.trajectory import GenerateRequest
from rl_rollout_sglang import ROLLOUT_BACKEND
from rl_rollout_sglang.config import SglangConfig
from rl_rollout_sglang.replica import SglangReplica

no_time_limits()

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # these engines share the cores
KINDS = ("dense", "tied", "moe")
PROMPTS = ([5, 6, 7, 8], [40, 41], [9, 9, 30, 12, 13, 70, 4])
EOS_ID = 3
"""A token that model A samples often enough to end by itself."""
HERE = Path(__file__).parent
SHAPE = {
    "vocab_size": 80,
    "hidden_size": 64,
    "intermediate_size": 128,  # a multiple of 64 for each of two ranks, see the README
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
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
            item.add_marker(pytest.mark.xdist_group("sglang-engines"))


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
    """Directories of models A, B and C of every kind; engines are started on C."""
    root = tmp_path_factory.mktemp("models")
    found = {}
    for kind in KINDS:
        found[kind] = [root / f"{kind}-{letter}" for letter in "abc"]
        for seed, path in enumerate(found[kind]):
            make_model(kind, seed).save_pretrained(path)
            if kind == "dense":
                make_tokenizer().save_pretrained(path)
    return found


def make_tokenizer():
    """Words `t0` to `t79`: without one SGLang serves token ids only."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {f"t{token}": token for token in range(SHAPE["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0")


@pytest.fixture(scope="session")
def weight_sets(model_dirs):
    """The weights of models A, B and C of every kind, as a trainer publishes them."""
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
        config = SglangConfig(
            local_path=str(path),
            dtype="float32",
            tensor_model_parallel_size=tp_size,
            kv_cache_memory_gb=0.0625,
            bucket_megabytes=0.05,
            log_dir=str(log_dir),
            **settings,
        )
        placement = Placement(tp_size=tp_size)
        replica = SglangReplica(config, ProcessLauncher(log_dir), placement)
        super().__init__(ROLLOUT_BACKEND, replica, config)
        self.cold = None
        self.log_dir = Path(log_dir)

    def look(self, weights):
        """Note what it is that was started on `weights`, which SGLang has loaded by itself."""
        [first, *_] = self.adapters
        digests = first.live_digests(CALL_S)
        with pytest.raises(ReplicaFencedError) as refused:
            first.generate(_requests(GREEDY, PROMPTS), CALL_S)
        manifest = weights.manifest(self.next_version())
        path = Path(self.config.local_path)
        first.update_weights_from_disk(path, manifest, Deadline.after(CALL_S))
        first.commit(manifest.version, CALL_S)
        found = first.generate(_requests(GREEDY, PROMPTS), CALL_S)
        answers = [(item.token_ids, item.log_probs) for item in found]
        self.cold = ColdStart(weights, refused.value, answers, digests)

    def load_path(self, name):
        """Update by `bracketed` or `plain` from here on."""
        self.server.call("use_load_path", name, timeout=CALL_S)

    def patches_off(self, *names):
        """Turn off exactly these patches."""
        self.server.call("disable_patches", names, timeout=CALL_S)

    def experiment(self, name):
        """What a function of `in_scheduler` says on every rank."""
        return self.worker("experiment", str(HERE / "in_scheduler.py"), name)

    def said(self, words):
        """How many lines of what its processes logged say so."""
        texts = [path.read_text() for path in self.log_dir.iterdir()]
        return sum(words in line for text in texts for line in text.splitlines())


_NUMBERS = itertools.count()


def _requests(sampling, prompts):
    return [GenerateRequest(f"ask-{next(_NUMBERS)}", list(prompt), sampling) for prompt in prompts]


ENGINES = {"dense": {}, "moe": {}, "tied": {"tp_size": 2}}
"""The engines that are started: every kind of model once."""


@pytest.fixture(scope="session")
def engines(model_dirs, weight_sets, tmp_path_factory):
    """One engine for every kind of model, which SGLang has started on C."""

    def start(kind):
        logs = tmp_path_factory.mktemp(f"{kind}-logs")
        started = Started(model_dirs[kind][2], logs, load_format="auto", **ENGINES[kind])
        started.look(weight_sets[kind][2])
        return started

    engines = StartedReplicas(start)
    yield engines
    engines.end()


@pytest.fixture
def dense(engines, weight_sets):
    """The dense engine, serving A."""
    started = engines("dense")
    started.sync(weight_sets["dense"][0])
    return started


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

    def ask(started, sampling, prompts=PROMPTS):
        return started.adapters[0].generate(_requests(sampling, prompts), CALL_S)

    return ask


@pytest.fixture(scope="session")
def under_test(engines, weight_sets, save):
    """What the contract kit wants to know of a replica."""

    def make(kind):
        started = engines(kind)
        first, second, _ = weight_sets[kind]
        model_config = json.loads(Path(started.config.local_path, "config.json").read_text())
        return RolloutUnderTest(
            started.adapters,
            first,
            second,
            PROMPTS,
            cold_start=started.cold,
            save=save,
            layout=load_object(ROLLOUT_BACKEND.layout)(model_config, started.config),
            flip=lambda *what: started.worker("flip", *what),
            eos_id=EOS_ID,
            long_tokens=600,
            steps=started.steps,
            may_be_deaf=frozenset(name for name in first.tensors if "experts" in name),
            resident=lambda: private_bytes(peer["pid"] for peer in started.state()["workers"]),
            filling=[[(5 + n) % 80] * 1000 for n in range(60)],  # of 65536 tokens
        )

    return make
