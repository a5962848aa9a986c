"""The program in the README runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.engine
def test_the_program_updates_and_generates(model_dirs, tmp_path):
    [program] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script), str(model_dirs["dense"][0])],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "LoadReport(version=PolicyVersion(epoch=1, step=0)" in done.stdout
    assert "VersionSpan(version=PolicyVersion(epoch=1, step=0), start=0, end=8)" in done.stdout


def test_every_setting_of_the_table_exists():
    from rl_rollout_sglang.config import SglangConfig

    table = README.read_text().partition("## Settings")[2].partition("## What SGLang")[0]
    keys = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert set(keys) <= set(SglangConfig.__dataclass_fields__)
    assert len(keys) > 10
