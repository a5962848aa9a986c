"""`minirl verify` compares a directory with what a server says that its engine holds."""

import json
import socket

import pytest
import torch
from safetensors.torch import save_file

from minirl.main import main
from minirl.stored_weights import StoredWeights
from rl_core.errors import ConfigError
from rl_core.plugins import ROLLOUT_BACKENDS, load_backend, load_object
from rl_core.rollout.expected_digests import expected_digests
from rl_core.rollout.live_route import PATH
from rl_core.testing.answering_server import answering

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (16, 8),
    "lm_head.weight": (16, 8),
    "model.norm.weight": (8,),
    f"{LAYER}input_layernorm.weight": (8,),
    f"{LAYER}post_attention_layernorm.weight": (8,),
    f"{LAYER}mlp.gate_proj.weight": (12, 8),
    f"{LAYER}mlp.up_proj.weight": (12, 8),
    f"{LAYER}mlp.down_proj.weight": (8, 12),
    **{f"{LAYER}self_attn.{part}_proj.weight": (8, 8) for part in "qkvo"},
}
IDENTITY = {
    "vllm": {"GET /version": (200, {"version": "0.32.0"})},
    "sglang": {"GET /model_info": (200, {"model_path": "/models/a"})},
}
"""By what a server of each kind is recognised."""


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.fixture
def write(tmp_path):
    """Writes a directory of the model with these tensors, in one file or in several."""

    def write(name, tensors, shards=1, **config):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(CONFIG | config))
        if shards == 1:
            save_file(tensors, path / "model.safetensors")
            return path
        places = {}
        for number in range(shards):
            file = f"model-{number}.safetensors"
            part = dict(list(tensors.items())[number::shards])
            save_file(part, path / file)
            places |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": places}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return path

    return write


def held(path, engine="vllm", tp_size=2):
    """What the ranks of an engine hold that has loaded the directory."""
    backend = load_backend(ROLLOUT_BACKENDS, engine)
    settings = {
        "dtype": "float32",
        "tensor_model_parallel_size": tp_size,
        "max_model_len": 32,
    }
    config = load_object(backend.config_cls)(local_path=str(path), **settings)
    spec = load_object(backend.layout)(json.loads((path / "config.json").read_text()), config)
    weights = StoredWeights(path)
    ranks = expected_digests(iter(weights), weights.manifest, spec, range(tp_size), tp_size)
    return {
        "engine": engine,
        "device": "cpu",
        "settings": settings,
        "ranks": [{name: one.digest for name, one in rank.tensors.items()} for rank in ranks],
    }


@pytest.fixture
def verify(capsys):
    """Exit code, lines and error of the command against an engine that holds `live`."""

    def verify(path, live, *arguments, engine="vllm"):
        with answering({**IDENTITY[engine], f"GET {PATH}": (200, live)}) as server:
            code = main(["verify", str(path), server.address, *arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return verify


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_right_directory_is_clean_on_every_rank(verify, write, tensors, engine):
    path = write("a", tensors)
    code, lines, err = verify(path, held(path, engine), engine=engine)
    assert (code, err) == (0, "")
    assert f"against {path}: device=cpu, dtype=float32, tensor_model_parallel_size=2" in lines[0]
    ranks = [line for line in lines if line.startswith("rank ")]
    assert len(ranks) == 2
    for number, line in enumerate(ranks):
        assert line.startswith(f"rank {number}: matched=")
        assert line.endswith("mismatched=0 missing=0 unexpected=0 unverifiable=0")
    assert lines[-1] == "every rank holds these weights"


def test_one_changed_weight_is_named_on_both_sides_with_both_digests(verify, write, tensors):
    live = held(write("a", tensors))
    name = f"{LAYER}self_attn.k_proj.weight"
    changed = tensors[name].clone()
    changed[0, 0] += 1  # a row of rank 0
    path = write("b", {**tensors, name: changed})
    code, lines, _ = verify(path, live)
    assert code == 1
    bad = [line for line in lines if line.startswith("  ")]
    assert len(bad) == 1
    runtime = f"{LAYER}self_attn.qkv_proj.weight"
    parts = " + ".join(f"{LAYER}self_attn.{part}_proj.weight[0:4]" for part in "qkv")
    wanted = held(path)["ranks"][0][runtime]
    assert bad[0] == (
        f"  mismatched {runtime} <- {parts}: expected {wanted}, holds {live['ranks'][0][runtime]}"
    )
    assert lines.index(bad[0]) == 2  # below rank 0
    assert "mismatched=0" in lines[3]
    assert lines[-1] == "the engine does not hold these weights: 1 tensors are wrong"


def test_missing_unexpected_and_unverifiable_tensors_are_named(verify, write, tensors):
    path = write("a", tensors)
    live = held(path)
    live["ranks"][1].pop("model.norm.weight")
    live["ranks"][0]["model.layers.7.mlp.down_proj.weight"] = "wsum64:01"
    live["ranks"][0]["draft\x1b[2J"] = "wsum64:02\n"
    code, lines, _ = verify(path, live)
    assert code == 1
    expected = held(path)["ranks"][1]["model.norm.weight"]
    assert (
        f"  missing model.norm.weight <- model.norm.weight: expected {expected}, holds nothing"
    ) in lines
    assert (
        "  unexpected model.layers.7.mlp.down_proj.weight: expected nothing, holds wsum64:01"
    ) in lines
    assert any(line.startswith("  unverifiable draft\\x1b[2J: the layout of") for line in lines)


def test_something_unverifiable_is_not_clean(verify, write, tensors):
    path = write("a", tensors)
    live = held(path)
    live["ranks"][0]["something.of.its.own"] = "wsum64:01"
    code, lines, _ = verify(path, live)
    assert code == 1
    assert any("unverifiable something.of.its.own" in line for line in lines)
    assert lines[-1].startswith("nothing is wrong, and 1 tensors could not be verified")
    lenient = "checkpoint_engine.debug.strict=false"
    assert verify(path, live, lenient)[0] == 0
    assert verify(path, live, "checkpoint_engine.debug.strict=true")[0] == 1
    del live["ranks"][0]["model.norm.weight"]
    assert verify(path, live, lenient)[0] == 1


def test_weights_in_several_files_are_those_of_the_index(verify, write, tensors):
    live = held(write("a", tensors))
    path = write("b", tensors, shards=3)
    save_file({"model.norm.weight": torch.zeros(8)}, path / "consolidated.safetensors")
    assert verify(path, live)[0] == 0


def test_a_tied_head_is_the_embedding(verify, write, tensors):
    whole = write("a", tensors, tie_word_embeddings=True)  # with a head that is not used
    live = held(whole)
    assert live["ranks"][0]["lm_head.weight"]
    without = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    assert verify(whole, live)[0] == 0
    assert verify(write("b", without, tie_word_embeddings=True), live)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rollout.tensor_model_parallel_size=4"], "tensor_model_parallel_size=4: the engine at"),
        (["rollout.dtype=bfloat16"], "rollout.dtype=bfloat16: the engine at"),
        (["rollout.name=sglang"], "is not SGLang"),
        (["rollout.name=trt"], "no rollout_backends named 'trt'"),
        (["rollout.temperature=1"], "rollout.temperature has no meaning here"),
        (["rollout.tensor_model_parallel_size=x"], "tensor_model_parallel_size"),
    ],
)
def test_what_contradicts_the_engine_is_one_line(verify, write, tensors, arguments, words):
    path = write("a", tensors)
    code, lines, err = verify(path, held(path), *arguments)
    assert (code, lines) == (2, [])
    assert words in err
    assert err.count("\n") == 1


def test_what_agrees_with_the_engine_may_be_given(verify, write, tensors):
    path = write("a", tensors)
    same = ["rollout.name=vllm", "rollout.dtype=float32", "rollout.tensor_model_parallel_size=2"]
    assert verify(path, held(path), *same, "checkpoint_engine.timeout_s=30")[0] == 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"split": {"pipeline_parallel_size": 2}}, "runs with pipeline_parallel_size=2"),
        ({"ranks": [{}]}, "1 ranks answer"),
        ({"settings": {"dtype": "int3", "tensor_model_parallel_size": 2}}, "rollout.dtype='int3'"),
        ({"settings": {"tensor_model_parallel_size": 2, "new": 1}}, "unknown key rollout.new"),
        ({"device": 5}, "device"),
    ],
)
def test_an_engine_that_cannot_be_compared_is_one_line(verify, write, tensors, changed, words):
    path = write("a", tensors)
    code, lines, err = verify(path, {**held(path), **changed})
    assert (code, lines) == (2, [])
    assert words in err
    assert err.count("\n") == 1


def test_digests_of_another_kind_are_one_line(verify, write, tensors):
    path = write("a", tensors)
    live = held(path)
    live["ranks"][1]["model.norm.weight"] = "xxh3-128:00"
    code, lines, err = verify(path, live)
    assert (code, lines) == (2, [])
    assert err.count("\n") == 1


def test_wrong_arguments_are_one_line(capsys, write, tensors):
    path = str(write("a", tensors))
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = f"127.0.0.1:{free.getsockname()[1]}"
    with answering({}) as server:
        cases = {
            (): "a directory and HOST:PORT",
            (path,): "a directory and HOST:PORT",
            (path, "http://127.0.0.1:80"): "is no HOST:PORT",
            (path, closed): "no answer from",
            (path + "/nothing", closed): "no config.json there",
            (path, server.address): "is not SGLang or vLLM",
        }
        for arguments, words in cases.items():
            assert main(["verify", *arguments]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert words in err, arguments
            assert err.count("\n") == 1


# -- the directory


def index(path, places):
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def damaged(path):
    (path / "model.safetensors").write_bytes(b"\xff" * 64)


def no_file(path):
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damaged, "cannot be read as safetensors"),
        (no_file, "model.safetensors cannot be read"),
        (lambda path: index(path, {"x": "other.safetensors"}), "other.safetensors cannot be read"),
        (lambda path: index(path, {"x": "model.safetensors"}), "lacks 'x'"),
        (lambda path: index(path, {"x": "../model.safetensors"}), "no file beside it"),
        (lambda path: index(path, {"x": 5}), "no file beside it"),
        (lambda path: index(path, [1]), "is no index of weights"),
    ],
)
def test_a_damaged_directory_is_named(write, tensors, damage, words):
    path = write("a", tensors)
    damage(path)
    with pytest.raises(ConfigError, match=words):
        StoredWeights(path)


def test_a_dtype_that_no_layout_has_is_named(write, tensors):
    path = write("a", {**tensors, "odd": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ConfigError, match=r"'odd'.*complex64"):
        StoredWeights(path)
