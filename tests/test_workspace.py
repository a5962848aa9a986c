"""What is written in two places is the same in both."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_overrides_are_those_of_the_workspace():
    """`uv pip` takes tools/cpu-overrides.txt outside the checkout, and the workspace's inside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = (ROOT / "tools" / "cpu-overrides.txt").read_text().splitlines()
    assert lines == project["tool"]["uv"]["override-dependencies"]
