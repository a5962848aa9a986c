"""Ask three witnesses what the engine serves after syncs, for every kind of model and TP size.

    uv run tools/served_weights.py

For each combination: greedy tokens and log-probs of the synced engine, of a stock vLLM started on
the saved model, and of transformers. Exit code 1 if any tokens differ or any log-prob by more than
1e-4 (float32). The test suite runs three of the six combinations.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "serve_and_compare.py"
TOLERANCE = 1e-4


def compare(kind: str, tp_size: int) -> bool:
    """Run one combination and print its line; whether all witnesses agree."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(SCRIPT), directory, kind, str(tp_size)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode != 0:
        sys.stdout.write(f"{kind:6} tp={tp_size}  failed: {done.stderr.splitlines()[-1]}\n")
        return False
    answers = json.loads(done.stdout.splitlines()[-1])
    good = True
    for witness in ("fresh", "transformers"):
        same, difference = _distance(answers["served"], answers[witness])
        good = good and same and difference <= TOLERANCE
        sys.stdout.write(
            f"{kind:6} tp={tp_size}  {witness:12}  same tokens: {same}, "
            f"largest log-prob difference: {difference:.1e}\n"
        )
    sys.stdout.flush()
    return good


def _distance(mine: list[Any], theirs: list[Any]) -> tuple[bool, float]:
    same = all(left[0] == right[0] for left, right in zip(mine, theirs, strict=True))
    pairs = (
        (a, b) for m, t in zip(mine, theirs, strict=True) for a, b in zip(m[1], t[1], strict=True)
    )
    return same, max(abs(a - b) for a, b in pairs)


def main() -> int:
    """Exit code 1 if any witness disagrees."""
    combinations = itertools.product(("dense", "tied", "moe"), (1, 2))
    agreed = [compare(kind, tp_size) for kind, tp_size in combinations]
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
