"""The benchmark of the READMEs runs, small, and reports every ratio it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "tools" / "bench_transfer.py"


@pytest.mark.engine
def test_a_quick_look(tmp_path):
    found = tmp_path / "bench.json"
    command = [sys.executable, str(BENCH), "--engines", "hccl", "--megabytes", "8"]
    command += ["--rounds", "1", "--receivers", "1", "--buckets", "1", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(found.read_text())[0]
    assert {"hccl copy realistic / naive", "hccl lend large / raw"} <= result["ratios"].keys()
    assert all(ratio > 0 for ratio in result["ratios"].values())
    assert result["cores"].keys() == result["gib_per_s"].keys()
    assert all(cores >= 0 for cores in result["cores"].values())  # less than a tick is 0
