"""After syncs, the engine serves exactly the weights that the trainer saves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).parent / "serve_and_compare.py"


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "tied", "moe"])
def test_three_witnesses_agree(tmp_path, kind, tp_size):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), kind, str(tp_size)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    for witness in ("fresh", "transformers"):
        for mine, theirs in zip(answers["served"], answers[witness], strict=True):
            assert mine[0] == theirs[0], witness
            assert mine[1] == pytest.approx(theirs[1], abs=1e-4), witness
