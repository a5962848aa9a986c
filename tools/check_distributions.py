"""Build every wheel and sdist, and use them as somebody else would.

    uv run tools/check_distributions.py             everything
    uv run tools/check_distributions.py rl-core     only this one, built and checked alone

For each distribution: its wheel holds the package, its licence and `py.typed` and no tests; alone
in a fresh environment it imports, its entry points load, and nothing of the siblings comes with
it; the tests in its sdist pass there. In the end all are installed together, first the wheels, then
with the README's line.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from test_packages import OPTIONS, ROOT, packages

OVERRIDES = ROOT / "tools" / "cpu-overrides.txt"
EXTRAS = {
    "rl-rollout-sglang": "cpu",
    "rl-rollout-vllm": "cpu",
    "rl-ckpt-mooncake": "cpu",
    "rl-core": "torch",
}
SUITE_EXTRA = "rl-core[testing]"
NEEDS_THE_OTHERS = "rl-minirl"
"""The application composes its siblings: it is not checked alone."""


@dataclass(frozen=True)
class Distribution:
    """One package and what was built of it."""

    name: str
    source: Path
    wheel: Path
    sdist: Path

    @property
    def requirement(self) -> str:
        """The wheel, with the extra that makes it work on the CPU."""
        extra = EXTRAS.get(self.name)
        return f"{self.wheel}[{extra}]" if extra else str(self.wheel)

    @property
    def module(self) -> str:
        """Name to import it by."""
        [package] = [path for path in (self.source / "src").iterdir() if path.is_dir()]
        return package.name

    @property
    def groups(self) -> dict[str, dict[str, str]]:
        """Entry points by group."""
        project = tomllib.loads((self.source / "pyproject.toml").read_text())["project"]
        found: dict[str, dict[str, str]] = project.get("entry-points", {})
        return found


class Environment:
    """A fresh virtual environment that finds our distributions in `dist` and nowhere else."""

    def __init__(self, path: Path, dist: Path) -> None:
        self.python = path / "bin" / "python"
        self._dist = dist
        run("uv", "venv", "-q", "--python", "3.11", str(path))

    def install(self, *requirements: str) -> None:
        """Add distributions, with the overrides that the README names."""
        command = ["uv", "pip", "install", "-q", "--compile-bytecode", "--python", str(self.python)]
        command += ["--overrides", str(OVERRIDES), "--find-links", str(self._dist)]
        run(*command, *requirements)

    def check(self, code: str) -> None:
        """Run a line of Python there."""
        run(str(self.python), "-c", code)

    def installed(self) -> set[str]:
        """Names of all distributions in it."""
        lines = run("uv", "pip", "list", "-q", "--python", str(self.python)).splitlines()[2:]
        return {line.split()[0].lower() for line in lines}


def run(*command: str, cwd: Path | None = None) -> str:
    """Output of a command that must succeed; its errors go to ours."""
    environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        sys.stdout.write(done.stdout[-4000:])
        raise SystemExit(f"failed with {done.returncode}: {' '.join(command)}")
    return done.stdout


def build(name: str, source: Path, dist: Path) -> Distribution:
    """Wheel and sdist; the wheel is built from the sdist."""
    run("uv", "build", "-q", "--out-dir", str(dist), str(source))
    stem = name.replace("-", "_")
    [wheel] = dist.glob(f"{stem}-*.whl")
    [sdist] = dist.glob(f"{stem}-*.tar.gz")
    return Distribution(name, source, wheel, sdist)


def check_wheel(item: Distribution) -> None:
    """What is in the wheel."""
    names = zipfile.ZipFile(item.wheel).namelist()
    assert f"{item.module}/py.typed" in names, names
    assert any(name.endswith("licenses/LICENSE") for name in names), names
    assert not [name for name in names if name.startswith("tests/")], names


def check_alone(item: Distribution, directory: Path, dist: Path, siblings: set[str]) -> None:
    """Import, entry points, tests of the sdist, in an environment with nothing else."""
    environment = Environment(directory / "venv", dist)
    environment.install(item.requirement)
    foreign = environment.installed() & (siblings - {item.name, "rl-core"} | {"ray"})
    assert not foreign, f"{item.name} brings {sorted(foreign)}"
    environment.check(f"import {item.module}")
    for group in item.groups:
        environment.check(
            "from importlib.metadata import entry_points\n"
            f"for entry in entry_points(group={group!r}): entry.load()"
        )
    environment.install(SUITE_EXTRA)
    with tarfile.open(item.sdist) as archive:
        archive.extractall(directory, filter="data")
    [unpacked] = directory.glob(f"{item.name.replace('-', '_')}-*")
    run(str(environment.python), "-m", "pytest", "-q", *OPTIONS.split(), "tests", cwd=unpacked)


def check_together(items: list[Distribution], directory: Path, dist: Path) -> None:
    """All of them in one environment, in which the application imports."""
    environment = Environment(directory, dist)
    environment.install(*(item.requirement for item in items))
    missing = {item.name for item in items} - environment.installed()
    assert not missing, missing
    environment.check("import minirl.task_runner")


def check_readme(directory: Path, dist: Path) -> None:
    """The README's command, into a fresh environment."""
    [line] = re.findall(r"^uv pip install .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    environment = Environment(directory, dist)
    run("bash", "-c", f"{line} --python {environment.python}", cwd=ROOT)
    environment.check("import minirl.task_runner")


def main() -> int:
    """0, or an error at the first thing that is wrong."""
    known = packages()
    wanted = sys.argv[1:] or sorted(known)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        dist = directory / "dist"
        items = {name: build(name, source, dist) for name, source in known.items()}
        for name in wanted:
            check_wheel(items[name])
            if name != NEEDS_THE_OTHERS:
                check_alone(items[name], directory / name, dist, set(known))
            sys.stdout.write(f"{name}: good\n")
            sys.stdout.flush()
        if not sys.argv[1:]:
            check_together(list(items.values()), directory / "together", dist)
            check_readme(directory / "readme", dist)
            sys.stdout.write("all together: good\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
