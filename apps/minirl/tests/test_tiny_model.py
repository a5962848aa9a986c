"""The embedded model: deterministic, complete or absent, and readable by transformers."""

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from minirl.char_tokenizer import CHARACTERS, VOCABULARY
from minirl.model_directory import ensure_directory, is_complete, write_record
from minirl.tiny_model import Recipe, build_tiny_model, ensure_tiny_model
from rl_core.errors import ConfigError


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: build_tiny_model(root / kind, kind) for kind in ("dense", "tied", "moe")}


@pytest.fixture(scope="module")
def tokenizer(models):
    return AutoTokenizer.from_pretrained(models["dense"])


@settings(deadline=None, max_examples=50)
@given(text=st.text(st.sampled_from(CHARACTERS)))
def test_every_printable_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_other_characters_become_the_unknown_token(tokenizer):
    assert tokenizer("aé漢")["input_ids"][1:] == [tokenizer.unk_token_id] * 2


@settings(deadline=None, max_examples=20)
@given(content=st.text(st.sampled_from(CHARACTERS), min_size=1))
def test_the_chat_template_ends_with_the_assistants_turn(tokenizer, content):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"<|system|>s<|end|><|user|>{content}<|end|><|assistant|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(content) + 6
    assert tokenizer.decode(ids, skip_special_tokens=True) == "s" + content


@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_the_directory_is_an_ordinary_model(models, kind):
    model = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32)
    stored = load_file(models[kind] / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in stored.values())
    assert ("lm_head.weight" in stored) == (kind != "tied")
    assert 0.8e6 < sum(tensor.numel() for tensor in stored.values()) < 2.2e6
    assert model.config.vocab_size == len(VOCABULARY)
    assert model.generation_config.eos_token_id == VOCABULARY.index("<|end|>")
    logits = model(torch.tensor([[4, 10, 20, 1, 5]])).logits
    assert logits.isfinite().all()
    assert not (models[kind] / "modeling.py").exists()
    assert "auto_map" not in json.loads((models[kind] / "config.json").read_text())


def test_expert_weights_have_hugging_face_names(models):
    names = load_file(models["moe"] / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names
    assert "model.layers.1.mlp.gate.weight" in names


def test_rope_is_configured_for_old_and_new_readers(models):
    stored = json.loads((models["dense"] / "config.json").read_text())
    assert stored["rope_theta"] == 10000.0
    assert AutoConfig.from_pretrained(models["dense"]).rope_parameters["rope_theta"] == 10000.0


def test_first_logits_are_almost_uniform(models):
    model = AutoModelForCausalLM.from_pretrained(models["dense"], dtype=torch.float32)
    probabilities = model(torch.tensor([[4, 90, 72, 96, 7, 24, 33, 1, 5]])).logits.softmax(-1)
    assert probabilities.max() < 0.2


def test_the_same_recipe_makes_the_same_bytes(models, tmp_path):
    again = build_tiny_model(tmp_path / "again")
    other = build_tiny_model(tmp_path / "other", seed=2)
    name = "model.safetensors"
    assert (again / name).read_bytes() == (models["dense"] / name).read_bytes()
    assert (other / name).read_bytes() != (again / name).read_bytes()


def test_the_directory_name_carries_the_recipe():
    recipes = [Recipe(), Recipe(seed=2), Recipe(kind="tied"), Recipe(revision=2)]
    assert len({recipe.directory_name for recipe in recipes}) == len(recipes)
    assert Recipe().directory_name == Recipe().directory_name


def test_it_is_kept_and_a_damaged_one_is_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = ensure_tiny_model()
    assert path.parent == tmp_path / "minirl"
    weights = path / "model.safetensors"
    intact, written = weights.read_bytes(), weights.stat().st_mtime_ns
    assert ensure_tiny_model() == path
    assert weights.stat().st_mtime_ns == written
    weights.write_bytes(intact[:-1000])
    ensure_tiny_model()
    assert weights.read_bytes() == intact
    (path / "config.json").unlink()
    ensure_tiny_model()
    assert is_complete(path)
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot write"):
        ensure_tiny_model()


def test_a_failed_build_leaves_nothing(tmp_path):
    def build(stage):
        (stage / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(ConfigError, match="disk full"):
        ensure_directory(tmp_path / "model", build)
    assert list(tmp_path.iterdir()) == []


def test_whoever_renames_second_takes_the_first_ones_result(tmp_path):
    target = tmp_path / "model"

    def write(stage, text):
        (stage / "file").write_text(text)
        write_record(stage, ["file"], {})

    def build(stage):
        ensure_directory(target, lambda inner: write(inner, "first"))
        write(stage, "second")

    ensure_directory(target, build)
    assert (target / "file").read_text() == "first"
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_two_processes_at_once(tmp_path):
    code = (
        "import pathlib, sys; from minirl.model_directory import *\n"
        "def build(stage):\n"
        "    (stage / 'file').write_bytes(bytes(1 << 20)); write_record(stage, ['file'], {})\n"
        "for index in range(50):\n"
        "    target = pathlib.Path(sys.argv[1], str(index)); ensure_directory(target, build)\n"
        "    assert is_complete(target)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert sorted(int(item.name) for item in tmp_path.iterdir()) == list(range(50))
