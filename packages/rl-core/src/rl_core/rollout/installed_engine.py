"""An engine as it is installed, looked at without importing it, which takes many seconds."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rl_core.errors import IncompatibleVersionError
from rl_core.rollout.engine_arguments import check_arguments
from rl_core.rollout.version_range import VersionRange


@dataclass(frozen=True)
class InstalledEngine:
    """What a backend says of its engine, and finds out of the one that is here.

    Attributes:
        name: how messages spell it.
        module: what is imported.
        distributions: names under which it may be installed.
        supported: versions that the backend works with. Older ones are refused; of newer ones it
            is said that nobody has tried them.
        remedy: what to install in place of one that is too old.
        arguments: files of its module, as patterns, whose classes declare its arguments.
        classes: names of those classes; empty for all.
        bounds: files, as patterns, whose `Field(ge=...)` say more of arguments of the same names.
    """

    name: str
    module: str
    distributions: tuple[str, ...]
    supported: VersionRange
    remedy: str
    arguments: tuple[str, ...]
    classes: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()

    def version(self) -> str | None:
        """The installed version; None if it is not installed, or under another name."""
        for distribution in self.distributions:
            try:
                return version(distribution)
            except PackageNotFoundError:
                continue
        return None

    def check_version(self) -> None:
        """IncompatibleVersionError for one that is too old."""
        found = self.version()
        if self.supported.place(found) == "older":
            msg = f"{self.name} {found} is too old: {self.supported} are supported; {self.remedy}"
            raise IncompatibleVersionError(msg)

    def remark(self) -> str:
        """What is to be said of the installed version; empty if it was tried."""
        found = self.version()
        place = self.supported.place(found)
        if place == "newer":
            return (
                f"{self.name} {found} is newer than all that were tried ({self.supported}): "
                "verify what it holds after a sync before you trust it"
            )
        return ""

    def check_arguments(self, kwargs: Mapping[str, Any]) -> None:
        """ConfigError for an argument that this engine lacks, or whose value cannot be right.

        Nothing is checked where the engine, or what declares its arguments, is not found.
        """
        root = self._directory()
        if kwargs and root is not None:
            declared = [path for pattern in self.arguments for path in sorted(root.glob(pattern))]
            bounded = [path for pattern in self.bounds for path in sorted(root.glob(pattern))]
            check_arguments(kwargs, declared, self.classes, bounded)

    def _directory(self) -> Path | None:
        spec = importlib.util.find_spec(self.module)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        return Path(places[0]) if places else None
