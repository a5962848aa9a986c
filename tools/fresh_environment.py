"""Virtual environments that know nothing of this checkout, and commands that must succeed."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

SECONDS = 1800.0
"""Longest time for one command: the tests of the slowest package on two cores, and some."""

OURS = ("VIRTUAL_ENV", "PYTHONPATH", "PYTEST_ADDOPTS", "UV_PROJECT_ENVIRONMENT")
"""Variables that would lead a command back to this checkout."""

SLOW = "PYTHONDONTWRITEBYTECODE"
"""With it every process compiles torch anew."""


class CommandError(Exception):
    """A command failed; the text is the end of what it printed."""


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; whatever it started has ended with it.

    Errors: CommandError, also when it takes longer than `SECONDS`.
    """
    environment = {key: value for key, value in os.environ.items() if key not in (*OURS, SLOW)}
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"took longer than {SECONDS:.0f} s: {' '.join(words)}") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise CommandError(f"{output[-6000:]}\nexit code {process.returncode}: {' '.join(words)}")
    return output


class Environment:
    """A fresh virtual environment, outside the checkout.

    Commands run in its directory: where uv finds a workspace, it would add the workspace's
    overrides to an installation.

    Args:
        directory: where it lies; must not exist.
        constraints: file that says where our own distributions are; the index is not asked for
            them.
    """

    def __init__(self, directory: Path, constraints: Path) -> None:
        self.python = directory / "bin" / "python"
        self._directory = directory
        self._constraints = constraints
        run("uv", "venv", "-q", "--python", "3.11", directory, cwd=directory.parent)

    def install(self, *requirements: str | Path, overrides: Path | None = None) -> None:
        """Add distributions, as `uv pip install` does."""
        command: list[str | Path] = ["uv", "pip", "install", "-q"]
        command += ["--python", self.python, "--constraints", self._constraints]
        command += ["--overrides", overrides] if overrides else []
        run(*command, *requirements, cwd=self._directory)

    def uninstall(self, names: Sequence[str]) -> None:
        """Take distributions out."""
        run("uv", "pip", "uninstall", "-q", "--python", self.python, *names, cwd=self._directory)

    def versions(self) -> dict[str, str]:
        """Versions of all distributions in it, by name."""
        command = ("uv", "pip", "list", "-q", "--format", "json", "--python", self.python)
        found = json.loads(run(*command, cwd=self._directory))
        return {item["name"].lower(): item["version"] for item in found}

    def execute(self, code: str) -> str:
        """What a program prints."""
        program = self._directory / "program.py"
        program.write_text(code)
        return run(self.python, program, cwd=self._directory)

    def script(self, name: str, *arguments: str) -> str:
        """What a console script of a distribution prints."""
        return run(self.python.with_name(name), *arguments, cwd=self._directory)
