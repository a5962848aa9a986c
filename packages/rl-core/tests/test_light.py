"""rl-core is light: only `rl_core.torch` and `rl_core.testing` know of torch."""

import subprocess
import sys
from pathlib import Path

import pytest

import rl_core

PACKAGE = Path(rl_core.__file__).parent
LIGHT = sorted(
    ".".join(("rl_core", *path.relative_to(PACKAGE).with_suffix("").parts))
    for path in (*PACKAGE.glob("*.py"), *PACKAGE.glob("interfaces/*.py"))
    if path.stem not in {"__init__", "torch"}
)
NEEDS_TORCH = [
    "rl_core.torch",
    *(f"rl_core.transfer.{name}" for name in ("buffers", "engine", "packing", "unpacking")),
]
HEAVY = ("torch", "numpy", "ray", "omegaconf", "vllm", "sglang", "transformers", "pytest")


def run(code):
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_module_but_torch_imports_nothing_heavy():
    assert "rl_core.publish" in LIGHT
    run(
        f"import importlib, sys\n"
        f"for name in ['rl_core', *{LIGHT}]: importlib.import_module(name)\n"
        f"found = [name for name in {HEAVY} if name in sys.modules]\n"
        f"assert not found, found"
    )


def test_the_launcher_starts_without_torch_and_pytest():
    run(
        "import sys, rl_core.testing.launcher, rl_core.testing.thread_launcher\n"
        f"found = [name for name in {HEAVY} if name in sys.modules]\n"
        "assert not found, found"
    )


def test_torch_helpers_import_torch_and_nothing_else_heavy():
    heavy = [name for name in HEAVY if name not in {"torch", "numpy"}]
    run(
        "import sys, rl_core.torch\n"
        f"found = [name for name in {heavy} if name in sys.modules]\n"
        "assert not found, found"
    )


def test_no_module_is_longer_than_the_cap():
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path.name: count for path, count in lengths.items() if count > 350} == {}


@pytest.mark.parametrize("module", NEEDS_TORCH)
def test_without_torch_the_extra_is_named(module):
    run(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from rl_core.errors import ComponentError\n"
        f"try: import {module}\n"
        "except ComponentError as error: assert 'rl-core[torch]' in str(error)\n"
        "else: raise SystemExit('no error')\n"
    )
