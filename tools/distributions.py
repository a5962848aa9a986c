"""What is built of the workspace's packages, and what must be in it."""

import re
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any

from fresh_environment import run

CORE = "rl-core"
SIDE_FILES = ("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml")


class DistributionError(Exception):
    """A wheel or an sdist is not what it should be."""


@dataclass(frozen=True)
class Distribution:
    """One package and what was built of it."""

    name: str
    source: Path
    wheel: Path
    sdist: Path

    @property
    def stem(self) -> str:
        """Its name in file names."""
        return self.name.replace("-", "_")

    @property
    def project(self) -> dict[str, Any]:
        """The `project` table of its pyproject.toml."""
        table: dict[str, Any] = tomllib.loads((self.source / "pyproject.toml").read_text())
        project: dict[str, Any] = table["project"]
        return project

    @property
    def module(self) -> str:
        """Name to import it by."""
        [package] = (path for path in (self.source / "src").iterdir() if path.is_dir())
        return package.name

    @property
    def entry_points(self) -> dict[str, dict[str, str]]:
        """What it announces, by group, console scripts included."""
        groups: dict[str, dict[str, str]] = dict(self.project.get("entry-points", {}))
        scripts = self.project.get("scripts", {})
        return groups | ({"console_scripts": scripts} if scripts else {})

    def requirement(self, extra: str | None = None) -> str:
        """The wheel as a requirement, with an extra."""
        return f"{self.name}{f'[{extra}]' if extra else ''} @ {self.wheel.as_uri()}"

    def unpack(self, directory: Path) -> Path:
        """Unpack the sdist; its root directory."""
        with tarfile.open(self.sdist) as archive:
            archive.extractall(directory, filter="data")
        return directory / self.sdist.name.removesuffix(".tar.gz")


def build(name: str, source: Path, into: Path) -> Distribution:
    """Build the sdist, and the wheel from the sdist."""
    run("uv", "build", "-q", "--out-dir", into, source, cwd=into)
    stem = name.replace("-", "_")
    [wheel] = into.glob(f"{stem}-*.whl")
    [sdist] = into.glob(f"{stem}-*.tar.gz")
    return Distribution(name, source, wheel, sdist)


def check_wheel(item: Distribution, core_version: str) -> None:
    """The wheel holds the package, typed and licensed, and nothing else; its metadata is right.

    Errors: DistributionError.
    """
    with zipfile.ZipFile(item.wheel) as archive:
        names = archive.namelist()
        [info] = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
    _require(names, {f"{item.module}/py.typed", f"{info}/licenses/LICENSE"})
    others = {name.partition("/")[0] for name in names} - {item.module, info}
    if others:
        raise DistributionError(f"the wheel also holds {sorted(others)}")
    sources = (item.source / "src").rglob("*.py")
    _require(names, {str(path.relative_to(item.source / "src")) for path in sources})
    _check_metadata(item, metadata, core_version)


def _check_metadata(item: Distribution, metadata: Message, core_version: str) -> None:
    for field, value in (
        ("Name", item.name),
        ("Version", item.project["version"]),
        ("License-Expression", "Apache-2.0"),
    ):
        if metadata[field] != value:
            raise DistributionError(f"{field} of the wheel is {metadata[field]!r}, not {value!r}")
    if metadata.get_payload() != (item.source / "README.md").read_text():
        raise DistributionError("the description of the wheel is not the README")
    for requirement in metadata.get_all("Requires-Dist", []):
        check_pin(item.name, requirement, core_version)


def check_pin(name: str, requirement: str, core_version: str) -> None:
    """A member requires, of the members, itself and rl-core, and this as `>=0.y,<0.(y+1)`.

    Errors: DistributionError.
    """
    found = re.match(r"(rl-[\w-]+)(?:\[[\w,-]+\])?\s*([^;]*)", requirement)
    if found is None or found[1] == name:
        return
    if found[1] != CORE:
        raise DistributionError(f"requires its sibling: {requirement}")
    major, minor = map(int, core_version.split(".")[:2])
    wanted = {f">={major}.{minor}", f"<{major}.{minor + 1}"}
    if set(re.sub(r"[\s()]", "", found[2]).split(",")) != wanted:
        raise DistributionError(f"{requirement} does not pin {CORE} to {sorted(wanted)}")


def check_sdist(item: Distribution) -> None:
    """The sdist holds the sources, the tests and what belongs beside them.

    Errors: DistributionError.
    """
    with tarfile.open(item.sdist) as archive:
        root = item.sdist.name.removesuffix(".tar.gz")
        names = [name.removeprefix(f"{root}/") for name in archive.getnames()]
    files = [*(item.source / "src").rglob("*.py"), *(item.source / "tests").rglob("*.py")]
    _require(names, {*SIDE_FILES, *(str(path.relative_to(item.source)) for path in files)})
    litter = [name for name in names if "__pycache__" in name or ".venv" in name]
    if litter:
        raise DistributionError(f"the sdist also holds {litter}")


def _require(names: list[str], wanted: set[str]) -> None:
    lacking = wanted - set(names)
    if lacking:
        raise DistributionError(f"{sorted(lacking)} are missing")
