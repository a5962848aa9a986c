"""A published directory is one that Hugging Face's own loader takes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl_core.channel import new_key
from rl_core.deadlines import CancelToken, Deadline
from rl_core.interfaces import TransferRole
from rl_core.metadata import Manifest
from rl_core.testing.checkpoint_driver import build_engine
from rl_core.testing.checkpoint_recipe import RUN_ID
from rl_core.torch import meta_of
from rl_core.versions import PolicyVersion

transformers = pytest.importorskip("transformers", reason="checked where transformers is installed")


@pytest.fixture
def model():
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config)


def test_from_pretrained_takes_the_directory(model, tmp_path):
    source = tmp_path / "model"
    model.config.save_pretrained(source)
    state = {
        name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    metas = tuple(meta_of(name, tensor) for name, tensor in state.items())
    manifest = Manifest(PolicyVersion(1, 7), metas, RUN_ID)
    options = {
        "root_dir": str(tmp_path / "root"),
        "model_dir": str(source),
        "max_shard_megabytes": 0.01,
    }
    path = publish(options, state, manifest)
    assert len(list(path.glob("*.safetensors"))) > 1
    loaded, report = transformers.Qwen3ForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def publish(options, state, manifest):
    """A sync with one receiver, which asks for the directory."""
    key, deadline = new_key(), Deadline.after(60)
    roles = [TransferRole(role, 0, key=key, run_id=RUN_ID) for role in ("sender", "receiver")]
    sender, receiver = (build_engine("disk", options, role) for role in roles)
    topology = type(sender).build_topology([sender.prepare()], [receiver.prepare()])
    weights = ((meta, state[meta.name]) for meta in manifest.tensors)
    with ThreadPoolExecutor(2) as threads:
        built = [
            threads.submit(engine.build_process_group, topology[role.role][0], deadline)
            for engine, role in zip((sender, receiver), roles, strict=True)
        ]
        for future in built:
            future.result(60)
        sent = threads.submit(sender.send_weights, weights, manifest, deadline, CancelToken())
        found = threads.submit(receiver.get_checkpoint_path, manifest, deadline).result(60)
        sent.result(60)
    for engine in (sender, receiver):
        engine.finalize(True)
        engine.shutdown()
    return found.path
