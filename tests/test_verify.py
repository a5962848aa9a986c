"""`minirl verify` against a vLLM and an SGLang that the app did not start."""

import json
import shutil
import urllib.request

import pytest
from safetensors.torch import load_file, save_file
from stock_servers import stock_server

from minirl.main import main
from minirl.tiny_model import Recipe, ensure_tiny_model
from rl_core.plugins import ROLLOUT_BACKENDS, load_backend, load_object
from rl_core.rollout.live_ranks import together

pytestmark = pytest.mark.engine

MODELS = {"vllm": Recipe(kind="moe"), "sglang": Recipe(kind="tied")}
FILE = "model.safetensors"
OUT = "model.layers.1.self_attn.o_proj.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"
RUNTIME = {OUT: OUT, KEY: "model.layers.0.self_attn.qkv_proj.weight"}
"""Names of tensors in the directory, and of what they are part of in the engines."""


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def served(engine, tmp_path_factory):
    """Directory of a model, and the address of an engine that serves it."""
    directory = ensure_tiny_model(MODELS[engine])
    log = tmp_path_factory.mktemp(engine) / "server.log"
    with stock_server(engine, directory, log) as address:
        yield directory, address


@pytest.fixture
def verify(capsys):
    def verify(*arguments):
        code = main(["verify", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return verify


def test_the_directory_that_is_served_is_clean(served, verify):
    code, lines, err = verify(*served)
    assert code == 0, lines or err
    assert lines[1].startswith("rank 0: matched=")
    assert lines[1].endswith(" mismatched=0 missing=0 unexpected=0 unverifiable=0")
    assert len(lines) == 3


@pytest.mark.parametrize("name", [OUT, KEY])
def test_one_changed_weight_is_named(served, verify, tmp_path, name):
    directory, address = served
    changed = tmp_path / "changed"
    shutil.copytree(directory, changed)
    tensors = {key: tensor.clone() for key, tensor in load_file(directory / FILE).items()}
    tensors[name][-1, -1] += 1e-3
    save_file(tensors, changed / FILE)
    code, lines, err = verify(changed, address)
    assert code == 1, err
    [bad] = [line for line in lines if line.startswith("  ")]
    assert bad.startswith(f"  mismatched {RUNTIME[name]} <- ")
    assert name in bad
    assert "mismatched=1 missing=0 unexpected=0 unverifiable=0" in lines[1]


def test_what_the_engine_has_otherwise_is_one_line(served, verify):
    code, lines, err = verify(*served, "rollout.tensor_model_parallel_size=2")
    assert (code, lines) == (2, [])
    assert "rollout.tensor_model_parallel_size=2: the engine at" in err


def test_what_the_engines_answer_by_themselves_is_the_same(served, engine):
    """vLLM's development mode, which does without our route; SGLang's own checksums."""
    _, address = served
    told = load_object(load_backend(ROLLOUT_BACKENDS, engine).probe)(address, 60).ranks
    if engine == "vllm":
        results = asked(address, "/collective_rpc", method="rl_live_weights")["results"]
        assert together(engine, results).ranks == told
    else:
        checked = asked(address, "/weights_checker", action="checksum")
        names = set(checked["ranks"][0]["checksums"])
        assert "model.layers.0.self_attn.qkv_proj.weight" in names
        assert names <= set(told[0])


def asked(address, path, **body):
    request = urllib.request.Request(f"http://{address}{path}", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)
