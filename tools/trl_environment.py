"""The environment that TRL's side of `beside_trl.py` runs in: from PyPI, in fixed versions."""

import json
from pathlib import Path

from fresh_environment import run

TRL = "1.16.0"
REQUIREMENTS = (
    f"trl=={TRL}",
    "torch==2.13.0",  # these two as MiniRL's lock has them: the same kernels on both sides
    "transformers==5.19.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
)
_DONE = "requirements.txt"


def ensure_environment(cache: Path) -> Path:
    """The Python of an environment with `REQUIREMENTS`, made in `cache` if it is not there.

    Errors: CommandError if uv cannot make it.
    """
    directory = cache / f"trl-{TRL}"
    python, done = directory / "bin" / "python", directory / _DONE
    wanted = "\n".join(REQUIREMENTS)
    if not done.is_file() or done.read_text() != wanted:
        # In the cache: where uv finds a workspace, it would add the workspace's overrides.
        cache.mkdir(parents=True, exist_ok=True)
        run("uv", "venv", "-q", "--clear", "--python", "3.11", directory, cwd=cache)
        command = ("uv", "pip", "install", "-q", "--compile-bytecode", "--python", python)
        run(*command, *REQUIREMENTS, cwd=cache)
        done.write_text(wanted)
    return python


def versions(python: Path) -> dict[str, str]:
    """Versions of the distributions in an environment, by name."""
    command = ("uv", "pip", "list", "-q", "--format", "json", "--python", python)
    found = json.loads(run(*command, cwd=python.parent))
    return {item["name"].lower(): item["version"] for item in found}
