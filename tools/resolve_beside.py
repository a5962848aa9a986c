"""Ask the resolver whether our distributions change anything in an environment that has an engine.

    uv run tools/resolve_beside.py                                     the engines below
    uv run tools/resolve_beside.py vllm==0.13.0 'sglang[all]'          others

For each engine: what `pip install` of it alone gives on Linux with CUDA, then the same packages in
the same versions with all of ours beside them. Prints what comes with ours, and fails with the
resolver's reason if a package of the engine would have to change. Nothing is installed; the
package index must be reachable.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = sorted([*ROOT.glob("packages/*"), *ROOT.glob("apps/*")])
ENGINES = ("vllm==0.13.0", "vllm", "sglang")
PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_35")
TIMEOUT_S = 300


class ResolutionError(Exception):
    """The resolver finds no solution; its reason is the text."""


def beside(engine: str) -> tuple[set[str], set[str]]:
    """What the engine's environment has, and what ours add to it, as `name==version`.

    ResolutionError if ours cannot be added without a change.
    """
    with tempfile.TemporaryDirectory() as directory:
        wanted = Path(directory) / "wanted.in"
        there = _resolved(wanted, [engine])
        added = _resolved(wanted, [*map(str, OURS), *sorted(there)]) - there
    return there, {line for line in added if "==" in line}


def _resolved(wanted: Path, requirements: list[str]) -> set[str]:
    """Pinned requirements, resolved as the README installs: from the checkout, `--no-config`.

    Without it uv would apply the overrides of the workspace, which are for the CPU.
    """
    wanted.write_text("\n".join(requirements))
    command = ("uv", "pip", "compile", "--no-config", "-q", "--no-header", "--no-annotate")
    done = subprocess.run(
        [*command, *PLATFORM, str(wanted)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise ResolutionError(done.stderr.strip())
    return set(done.stdout.split("\n")) - {""}


def main() -> int:
    """Exit code 1 if ours would change what one of the engines brings."""
    good = True
    for engine in sys.argv[1:] or ENGINES:
        try:
            there, added = beside(engine)
        except ResolutionError as error:
            good, line = False, f"BAD {engine}: {error}"
        else:
            line = f"ok  {engine}: {len(there)} packages stay; added: {' '.join(sorted(added))}"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
