import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_core.errors import ConfigError
from rl_train_fsdp.config import FsdpConfig, ModelConfig
from rl_train_fsdp.conversions import Conversions
from rl_train_fsdp.model_directory import ModelDirectory
from rl_train_fsdp.shard_loading import check_complete
from rl_train_fsdp.wrapping import build_on_meta


@pytest.fixture
def copy(models, tmp_path):
    """A private copy of a good directory."""
    target = tmp_path / "model"
    shutil.copytree(models("dense"), target)
    return target


def check(path):
    """What an engine does before it joins the others."""
    directory = FsdpConfig(ModelConfig(str(path))).check_files()
    model = build_on_meta(path)
    check_complete(model, Conversions(model, directory.tensors), directory)
    return directory


def rewrite(path, change):
    file = path / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def test_a_good_directory_is_described_without_reading_it(copy):
    directory = check(copy)
    tensors = load_file(copy / "model.safetensors")
    assert {n: (t.shape, t.dtype) for n, t in directory.tensors.items()} == {
        n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()
    }
    assert directory.architecture == "Qwen3ForCausalLM"
    assert directory.main_dtype == "float32"
    assert directory.num_parameters == sum(tensor.numel() for tensor in tensors.values())


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lengthen(path):
    with (path / "model.safetensors").open("ab") as file:
        file.write(bytes(64))


def enlarge_shape(path):
    """In its header only, whose length stays the same."""
    file = path / "model.safetensors"
    data = file.read_bytes()
    start = data.index(b'"shape":[') + len(b'"shape":[')
    file.write_bytes(data[:start] + bytes([data[start] ^ 1]) + data[start + 1 :])


def cut_header(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def damage_header(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"data_offsets", b"data_offsetz", 1))


def drop_tensor(path):
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)


def wrong_index(path):
    index = {"weight_map": {"lost.weight": "model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN = {
    "no directory": (shutil.rmtree, "does not exist"),
    "no config": (lambda path: (path / "config.json").unlink(), "has no config.json"),
    "bad config": (lambda path: (path / "config.json").write_text("{"), "cannot be read as JSON"),
    "no type": (lambda path: rewrite(path, lambda c: c.pop("model_type")), "names no model_type"),
    "unknown": (
        lambda path: rewrite(path, lambda c: c.update(model_type="nonesuch")),
        "no causal language model known to",
    ),
    "no count": (
        lambda path: rewrite(path, lambda c: c.update(num_attention_heads=0)),
        "num_attention_heads=0",
    ),
    "wrong value": (
        lambda path: rewrite(path, lambda c: c.update(rms_norm_eps="small")),
        "rms_norm_eps",
    ),
    "quantised": (
        lambda path: rewrite(path, lambda c: c.update(quantization_config={"x": 1})),
        "quantised",
    ),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "convert its weights"),
    "truncated": (truncate, "is truncated"),
    "too long": (lengthen, "has 64 bytes after its last tensor"),
    "another shape": (enlarge_shape, "has a damaged header at"),
    "truncated header": (cut_header, "is truncated"),
    "damaged header": (damage_header, "has a damaged header"),
    "lost tensor": (drop_tensor, "'model.norm.weight'"),
    "wrong index": (wrong_index, "'lost.weight'"),
    "wrong shape": (
        lambda path: rewrite(path, lambda c: c.update(intermediate_size=62)),
        "do not belong together",
    ),
    "wrong vocabulary": (
        lambda path: rewrite(path, lambda c: c.update(vocab_size=62)),
        "(vocab_size, hidden_size)",
    ),
    "wrong width": (
        lambda path: rewrite(path, lambda c: c.update(hidden_size=256)),
        "(vocab_size, hidden_size)",
    ),
    "too many layers": (
        lambda path: rewrite(path, lambda c: c.update(num_hidden_layers=9)),
        "num_hidden_layers=9",
    ),
    "layers described by a number": (
        lambda path: rewrite(path, lambda c: c.update(layer_types=5)),
        "layer_types is no list of names",
    ),
    "layers described wrongly": (
        lambda path: rewrite(path, lambda c: c.update(num_hidden_layers=1)),
        "layer_types",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_directory_is_one_line_naming_the_path(case, copy):
    damage, message = BROKEN[case]
    damage(copy)
    with pytest.raises(ConfigError) as caught:
        check(copy)
    assert message in str(caught.value)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_numbers_is_refused(copy):
    save_file({"x": torch.zeros(3, dtype=torch.int64)}, copy / "model.safetensors")
    with pytest.raises(ConfigError, match="no floating-point tensors"):
        ModelDirectory.open(copy)
