"""The package is light to import, and its controller side needs no engine."""

import subprocess
import sys
from typing import ClassVar

import pytest

from rl_core.plugins import ROLLOUT_BACKENDS
from rl_core.testing.package_contract import PackageContract


class TestPackage(PackageContract):
    distribution = "rl-rollout-sglang"
    module = "rl_rollout_sglang"
    entry = (ROLLOUT_BACKENDS, "sglang")
    blocked = ("sglang", "vllm", "ray", "omegaconf", "transformers")
    config: ClassVar = {}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _model(cls, model_dirs):
        cls.config = {"local_path": str(model_dirs["dense"][0])}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_missing_engine_is_named_with_what_to_install():
    code = """
import importlib.util
from rl_core.errors import ComponentNotFoundError
from rl_core.interfaces import Placement
from rl_rollout_sglang.server import SglangServer
importlib.util.find_spec = lambda name: None
try:
    SglangServer(None, Placement())._import_engine()
except ComponentNotFoundError as error:
    assert "rl-rollout-sglang[cpu]" in str(error)
else:
    raise SystemExit("no error")
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("disabled", [[], ["rotary_import"]])
def test_models_are_built_without_vllm(disabled):
    """What SGLang imports for rotary embeddings is there without vLLM, thanks to its patch only."""
    code = f"""
import os, sys
os.environ["RL_ROLLOUT_SGLANG_CPU"] = "1"
sys.modules["vllm"] = None  # not installed
from rl_rollout_sglang import cpu_plugin
others = set(cpu_plugin.PATCHES) - {{"rotary_import"}}
cpu_plugin.switch.disable([*others, *{disabled!r}])
cpu_plugin.install()
from vllm._custom_ops import rotary_embedding
"""
    result = run(code)
    assert (result.returncode == 0) == (not disabled), result.stderr


def test_the_plugin_leaves_an_engine_of_somebody_else_alone():
    """Neither a patch nor an import, unless our server's environment asks for it."""
    code = """
import sys
from rl_rollout_sglang import cpu_plugin
cpu_plugin.install()
assert "vllm._custom_ops" not in sys.modules
assert "sglang" not in sys.modules
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
