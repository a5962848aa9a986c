"""Patches of an engine: each for the versions it was made for, and turned off for tests."""

from collections.abc import Iterable, Mapping

from rl_core.rollout.version_range import VersionRange


class PatchSwitch:
    """Which of an engine's patches do their work in this process.

    Those within whose range the installed version lies, unless they are turned off.
    """

    def __init__(self, patches: Mapping[str, VersionRange], version: str | None) -> None:
        """Args: patches: by name, what they were made for; version: what is installed."""
        self._patches = patches
        self._version = version
        self._disabled: frozenset[str] = frozenset()

    def disable(self, names: Iterable[str]) -> None:
        """Turn off exactly these (for tests); ValueError for an unknown name."""
        chosen = frozenset(names)
        unknown = chosen - self._patches.keys()
        if unknown:
            raise ValueError(f"no such patch: {sorted(unknown)}")
        self._disabled = chosen

    def on(self, name: str) -> bool:
        """Whether a patch was left on, and was made for the installed version."""
        return name not in self._disabled and self._version in self._patches[name]

    @property
    def remark(self) -> str:
        """Which patches are not applied for the version's sake; empty if all are."""
        outside = [
            name for name, made_for in self._patches.items() if self._version not in made_for
        ]
        if not outside:
            return ""
        described = ", ".join(f"{name} ({self._patches[name]})" for name in outside)
        return f"version {self._version} is not what these patches were made for: {described}"
