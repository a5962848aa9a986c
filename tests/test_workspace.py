"""What is written in two places is the same in both."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from test_readme_commands import ELSEWHERE

ROOT = Path(__file__).resolve().parent.parent


def test_the_overrides_are_those_of_the_workspace():
    """`uv pip` takes tools/cpu-overrides.txt outside the checkout, and the workspace's inside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = (ROOT / "tools" / "cpu-overrides.txt").read_text().splitlines()
    assert lines == project["tool"]["uv"]["override-dependencies"]


def test_all_tests_are_run_once():
    """They are named in the order in which workers take them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    members = {f"packages/{path.parent.name}" for path in ROOT.glob("packages/*/tests")}
    paths = project["tool"]["pytest"]["ini_options"]["testpaths"]
    assert sorted(paths) == sorted({"tests", "apps", *members})


def test_the_tools_that_readmes_name_can_be_started(monkeypatch):
    """What they measure takes too long here; that they import what there is does not."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setattr(sys, "path", [*sys.path])  # they put more on it
    readmes = [*ROOT.glob("README*.md"), *ROOT.glob("[ap]*/*/README*.md")]
    named = {n for path in readmes for n in re.findall(r"tools/(\w+)\.py", path.read_text())}
    assert len(named) > 10
    for name in named:
        assert callable(importlib.import_module(name).main), name


def test_the_tests_that_run_commands_of_the_readmes_are_there():
    places = [path for place in ELSEWHERE.values() for path in re.findall(r"\w+/\w+\.py", place)]
    assert len(places) > 10
    assert [path for path in places if not (ROOT / path).is_file()] == []


MANAGED_PYTHON = """#!/bin/bash
# Like Debian's: pip installs nothing into it, only elsewhere.
[ "$5" = --target ] || { echo "error: externally-managed-environment"; exit 1; }
mkdir "$6/bin" && cp uv-of-pip "$6/bin/uv"
"""


def test_ci_runs_where_pip_may_not_change_the_system(tmp_path):
    for folder in (".ci", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    scripts = {
        ".ci/libraries": "",
        "bin/python3": MANAGED_PYTHON,
        "uv-of-pip": '#!/bin/bash\necho "$@" >> asked\n',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for tool in ("bash", "dirname", "mktemp", "mkdir", "cp", "rm", "env"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    environment = {**os.environ, "PATH": str(tmp_path / "bin"), "TMPDIR": str(tmp_path)}
    command = [str(tmp_path / ".ci" / "run")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "sync --locked"
    assert any(line.startswith("run pytest") for line in asked)
    assert not list(tmp_path.glob("tmp*"))  # nothing is left where uv was put
