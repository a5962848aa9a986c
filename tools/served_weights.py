"""Ask three witnesses what the engine serves after syncs, for every kind of model and TP size.

    uv run tools/served_weights.py

For each combination: greedy tokens and log-probs of the engine at the end of a run, of a stock vLLM
started on the saved model, and of transformers. Exit code 1 if any tokens differ or any log-prob by
more than 1e-4 (float32). Arguments are handed to `minirl`, such as `config=separate`.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from whole_runs import THREE_STEPS, VERIFIED
from witnesses import SERVED, TOLERANCE

from minirl.tiny_model import build_tiny_model

TESTS = Path(__file__).resolve().parent.parent / "tests"


def compare(directory: Path, kind: str, tp_size: int, extra: list[str]) -> bool:
    """Make one run, print its lines; whether all witnesses agree."""
    build_tiny_model(directory / "model", kind=kind, seed=3)
    run_dir = directory / "run"
    arguments = [
        f"actor.model_config.local_path={directory / 'model'}",
        f"rollout.tensor_model_parallel_size={tp_size}",
        f"checkpoint_engine.root_dir={directory / 'exchange'}",
        f"trainer.run_dir={run_dir}",
    ]
    run = _python("witnessed_run.py", *THREE_STEPS, *VERIFIED, *arguments, *extra)
    saved = str(run_dir / "checkpoints" / "final")
    asked = _python("witnesses.py", saved) if run.returncode == 0 else run
    if asked.returncode != 0:
        sys.stdout.write(f"{kind:6} tp={tp_size}  failed: {asked.stderr.splitlines()[-1]}\n")
        return False
    served = json.loads((run_dir / SERVED).read_text())["served"]
    testimonies = json.loads(asked.stdout.splitlines()[-1])[saved]
    agreed = [_report(kind, tp_size, name, served, one) for name, one in testimonies.items()]
    return all(agreed)


def _python(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(TESTS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def _report(kind: str, tp_size: int, witness: str, mine: list[Any], theirs: list[Any]) -> bool:
    same = all(left[0] == right[0] for left, right in zip(mine, theirs, strict=True))
    pairs = (
        (a, b) for m, t in zip(mine, theirs, strict=True) for a, b in zip(m[1], t[1], strict=True)
    )
    difference = max(abs(a - b) for a, b in pairs)
    sys.stdout.write(
        f"{kind:6} tp={tp_size}  {witness:12}  same tokens: {same}, "
        f"largest log-prob difference: {difference:.1e}\n"
    )
    sys.stdout.flush()
    return same and difference <= TOLERANCE


def main() -> int:
    """Exit code 1 if any witness disagrees."""
    agreed = []
    for kind, tp_size in itertools.product(("dense", "tied", "moe"), (1, 2)):
        with tempfile.TemporaryDirectory() as directory:
            agreed.append(compare(Path(directory), kind, tp_size, sys.argv[1:]))
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
