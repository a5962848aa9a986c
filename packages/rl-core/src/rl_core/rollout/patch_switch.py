"""Patches of an engine that can be turned off, so that tests show they are still needed."""

from collections.abc import Iterable


class PatchSwitch:
    """Which of an engine's patches do their work in this process: all, unless turned off."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._disabled: frozenset[str] = frozenset()

    def disable(self, names: Iterable[str]) -> None:
        """Turn off exactly these (for tests); ValueError for an unknown name."""
        chosen = frozenset(names)
        unknown = chosen - self._names
        if unknown:
            raise ValueError(f"no such patch: {sorted(unknown)}")
        self._disabled = chosen

    def on(self, name: str) -> bool:
        """Whether a patch was left on."""
        return name not in self._disabled
