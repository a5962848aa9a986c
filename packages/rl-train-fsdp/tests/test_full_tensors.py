"""What leaves an unsharded model, against what transformers writes of the same model."""

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from rl_core.versions import PolicyVersion
from rl_train_fsdp import full_tensors
from rl_train_fsdp.conversions import Conversions
from rl_train_fsdp.full_tensors import FullTensors
from rl_train_fsdp.model_directory import ModelDirectory
from rl_train_fsdp.shard_loading import load_shards
from rl_train_fsdp.wrapping import allocate, build_on_meta


def load(path):
    directory = ModelDirectory.open(path)
    model = build_on_meta(path)
    conversions = Conversions(model, directory.tensors)
    allocate(model, torch.device("cpu"))
    model.tie_weights()  # to_empty unties plain parameters; it keeps the identity of DTensors
    load_shards(model, conversions, directory)
    return model, conversions, directory


def stream(path, wire=None):
    full = FullTensors(*load(path), wire)
    manifest = full.manifest(PolicyVersion(1, 0), "run")
    tensors = {meta.name: (meta, tensor) for meta, tensor in full.stream()}
    assert tuple(meta for meta, _ in tensors.values()) == manifest.tensors
    for meta, tensor in tensors.values():
        assert tuple(tensor.shape) == meta.shape
        assert str(tensor.dtype) == f"torch.{meta.dtype}"
        assert tensor.is_contiguous()
    return tensors


@st.composite
def configs(draw):
    heads = draw(st.sampled_from([1, 2, 4]))
    shape = {
        "hidden_size": draw(st.sampled_from([8, 24])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])),
        "head_dim": draw(st.sampled_from([4, 6])),
        "intermediate_size": draw(st.integers(2, 20)),
        "vocab_size": draw(st.integers(5, 40)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if draw(st.booleans()):
        return transformers.Qwen3Config(**shape)
    return transformers.Qwen3MoeConfig(
        num_experts=draw(st.integers(1, 12)),
        num_experts_per_tok=1,
        moe_intermediate_size=draw(st.integers(2, 10)),
        mlp_only_layers=draw(st.sampled_from([[], [0]])),
        **shape,
    )


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(config=configs(), seed=st.integers(0, 99), bits=st.sampled_from(["float32", "bfloat16"]))
def test_the_stream_is_byte_equal_to_what_transformers_saves(
    config, seed, bits, tmp_path_factory, save_model
):
    path = save_model(tmp_path_factory.mktemp("m"), config, seed=seed, dtype=getattr(torch, bits))
    saved = load_file(path / "model.safetensors")
    streamed = stream(path, wire=bits)
    assert set(streamed) == set(saved)
    for name, (_, tensor) in streamed.items():
        assert torch.equal(tensor, saved[name]), name
        assert tensor.dtype == saved[name].dtype


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_one_tensor_is_gathered_at_a_time(kind, models, monkeypatch):
    """In bfloat16, so that what is gathered has memory of its own without ranks, too."""
    sizes, alive = {}, []

    def gathered(tensor):
        storage = tensor.untyped_storage()
        sizes[StorageWeakRef(storage)] = storage.nbytes()
        alive.append(sum(size for reference, size in sizes.items() if not reference.expired()))
        return tensor

    monkeypatch.setattr(full_tensors, "_gather", gathered)
    model, conversions, directory = load(models(kind))
    tensors = FullTensors(model, conversions, directory, "bfloat16").stream()
    while next(tensors, None) is not None:  # what it yields is given up before the next
        pass
    assert max(alive) == max(sizes.values()) < sum(sizes.values()) / 2


def test_experts_go_out_one_by_one(models):
    names = list(stream(models("moe")))
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names
    assert "model.layers.1.mlp.experts.4.down_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)


def test_a_tied_head_is_an_alias_without_bytes(models):
    tied = stream(models("tied"))
    assert tied["model.embed_tokens.weight"][0].aliases == ("lm_head.weight",)
    assert "lm_head.weight" not in tied
    assert "lm_head.weight" in stream(models("dense"))


def test_a_cast_on_the_wire_is_recorded(models):
    path = models("dense")
    saved = load_file(path / "model.safetensors")
    for name, (meta, tensor) in stream(path, wire="bfloat16").items():
        assert (meta.dtype, meta.source_dtype) == ("bfloat16", "float32")
        assert torch.equal(tensor, saved[name].to(torch.bfloat16))
    assert all(meta.source_dtype is None for meta, _ in stream(path).values())


def test_what_is_stored_wider_than_the_model_stays_wide(models, tmp_path):
    from safetensors.torch import save_file

    path = models("moe")
    mixed = {
        name: tensor.clone() if name.endswith("mlp.gate.weight") else tensor.to(torch.bfloat16)
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(mixed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    for name, (meta, tensor) in stream(tmp_path, wire="bfloat16").items():
        assert meta.dtype == ("float32" if name.endswith("mlp.gate.weight") else "bfloat16")
        assert torch.equal(tensor, mixed[name])


@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "llama", "gemma2"])
def test_loaded_models_compute_what_transformers_computes(kind, models):
    path = models(kind)
    ids = torch.arange(20).reshape(2, 10)
    model = load(path)[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits)
