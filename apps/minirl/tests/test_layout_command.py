"""`minirl layout` prints a table without starting anything."""

import json

import pytest

from minirl.main import main

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture
def model(tmp_path):
    def write(architecture, **more):
        config = {"architectures": [architecture], **SIZES, **more}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


def printed(capsys, *arguments):
    code = main(["layout", *arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


@pytest.mark.parametrize(
    ("engine", "head", "table"),
    [
        ("vllm", "model.embed_tokens.weight[vocabulary] (padded to 64)", "(256, 16)"),
        ("sglang", "model.embed_tokens.weight[vocabulary] (padded to 64)", "(384, 16)"),
    ],
)
def test_both_engines_have_a_table(capsys, model, engine, head, table):
    """Tied head, fused projections, and the buffers of the engine."""
    path = model("LlamaForCausalLM", tie_word_embeddings=True)
    lengths = ["data.max_prompt_length=64", "rollout.max_completion_length=64"]
    code, lines, _ = printed(capsys, path, f"rollout.name={engine}", *lengths)
    assert code == 0
    assert lines[0].startswith(f"LlamaForCausalLM in {engine} on cpu: 2 layers, 2 key-value heads")
    assert f"lm_head.weight <- {head}" in lines
    layer = "model.layers.{layer}.self_attn"
    assert (
        f"{layer}.qkv_proj.weight <- {layer}.q_proj.weight[rows] + {layer}.k_proj.weight[kv_heads]"
        f" + {layer}.v_proj.weight[kv_heads]"
    ) in lines
    assert any(f"cos_sin_cache = rotary table {table} base 10000.0" in line for line in lines)
    assert not any("experts" in line for line in lines)
    assert "not used by the engine: lm_head.weight" in lines


def test_a_scaled_rotary_table_is_in_no_table(capsys, model):
    path = model("LlamaForCausalLM", rope_scaling={"rope_type": "llama3"})
    _, lines, _ = printed(capsys, path)
    assert not any("cos_sin_cache" in line for line in lines)


def test_what_has_no_table_is_one_line(capsys, model, tmp_path):
    code, lines, err = printed(capsys, model("LamaForCausalLM"))
    assert (code, lines) == (2, [])
    assert "no layout table for LamaForCausalLM; the nearest that there is: LlamaForC" in err
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    code, lines, err = printed(capsys, str(tmp_path))
    assert (code, lines) == (2, [])
    assert "lacks 'num_attention_heads'" in err
    code, lines, err = printed(capsys, str(tmp_path / "nothing"))
    assert (code, lines) == (2, [])
    assert "no config.json there" in err
