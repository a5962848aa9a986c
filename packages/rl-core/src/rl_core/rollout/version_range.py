"""Versions of an engine that something was made for and tried with."""

import re
from dataclasses import dataclass
from typing import Literal

_NUMBERS = re.compile(r"\d+(?:\.\d+)*")
_UNTAGGED = re.compile(r"0\.[01]\.dev|0\.0\.0")
"""How a build from a source tree without tags calls itself."""


@dataclass(frozen=True)
class VersionRange:
    """From `oldest` to `newest`, both included: `0.32` as newest includes 0.32.5."""

    oldest: str
    newest: str

    def place(self, version: str | None) -> Literal["older", "within", "newer", "unknown"]:
        """Where a version lies; unknown if there is none, or if it is a build without a tag."""
        found = _numbers(version or "")
        if not found or _UNTAGGED.match(version or ""):
            return "unknown"
        oldest, newest = _numbers(self.oldest), _numbers(self.newest)
        if found < oldest:
            return "older"
        return "newer" if found[: len(newest)] > newest else "within"

    def __contains__(self, version: str | None) -> bool:
        """Whether a version is within; an unknown one is given the benefit of the doubt."""
        return self.place(version) in {"within", "unknown"}

    def __str__(self) -> str:
        return self.oldest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


def _numbers(version: str) -> tuple[int, ...]:
    match = _NUMBERS.match(version)
    return tuple(map(int, match.group().split("."))) if match else ()
