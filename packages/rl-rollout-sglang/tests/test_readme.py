"""The program in the README runs as it stands."""

import re
from pathlib import Path

import pytest

from rl_core.testing.readme_program import run_program

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.engine
def test_the_program_updates_and_generates(model_dirs, tmp_path):
    model = str(model_dirs["dense"][0])
    printed = run_program(README, tmp_path, model, timeout_s=240)
    assert "LoadReport(version=PolicyVersion(epoch=1, step=0)" in printed
    assert "VersionSpan(version=PolicyVersion(epoch=1, step=0), start=0, end=8)" in printed
    assert "mismatched=0, missing=0, unexpected=0, unverifiable=0)" in printed


def test_every_setting_of_the_table_exists():
    from rl_rollout_sglang.config import SglangConfig

    table = README.read_text().partition("## Settings")[2].partition("## What SGLang")[0]
    keys = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert set(keys) <= set(SglangConfig.__dataclass_fields__)
    assert len(keys) > 10
