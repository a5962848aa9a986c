"""Run each package's test suite alone, in an environment with its own dependencies only.

    uv run tools/test_packages.py              every package, one after the other
    uv run tools/test_packages.py rl-core      only this one
    uv run tools/test_packages.py --list       their names as JSON, for a CI matrix

A package that forgot to declare a dependency passes in the workspace's shared environment; here it
fails.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = "--import-mode=importlib -ra --strict-markers"
"""The workspace's own, but for the workers: pytest-xdist belongs to the workspace."""


def packages() -> dict[str, Path]:
    """Directories of the workspace members, by distribution name."""
    manifests = sorted(
        [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")]
    )
    return {
        tomllib.loads(manifest.read_text())["project"]["name"]: manifest.parent
        for manifest in manifests
    }


def run_suite(name: str, directory: Path) -> int:
    """Run one package's tests in an isolated environment; pytest's exit code."""
    command = ["uv", "run", "--isolated", "--locked", "--package", name, "--no-default-groups"]
    command += ["--group", "dev", "pytest", "-o", f"addopts={OPTIONS}", str(directory / "tests")]
    sys.stdout.write(f"== {name}: {' '.join(command)}\n")
    sys.stdout.flush()
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    """Exit code 1 if any suite failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="distribution names; all if none is given")
    parser.add_argument("--list", action="store_true", help="print the names as JSON and stop")
    arguments = parser.parse_args()
    known = packages()
    if arguments.list:
        sys.stdout.write(json.dumps(sorted(known)) + "\n")
        return 0
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"unknown packages {unknown}; known: {', '.join(sorted(known))}")
    names = arguments.names or sorted(known)
    failed = [name for name in names if run_suite(name, known[name]) != 0]
    sys.stdout.write(f"{len(names) - len(failed)} of {len(names)} suites passed")
    sys.stdout.write(f"; failed: {', '.join(failed)}\n" if failed else "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
