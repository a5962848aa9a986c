"""Policy versions: ordered, persisted, never going back.

A version is the pair (run epoch, training step) and reads `e<epoch>.s<step>` everywhere: in logs,
file names, messages and on every generated token. A new run starts at `e1.s0`. Resuming a run
raises the epoch and keeps the step, so that messages of the process that died are recognised as
stale however late they arrive.
"""

import json
import os
import re
from pathlib import Path

import msgspec

from rl_core.durable import sync_path
from rl_core.errors import ConfigError, StaleVersionError

_PATTERN = re.compile(r"e(0|[1-9]\d*)\.s(0|[1-9]\d*)", re.ASCII)


class PolicyVersion(msgspec.Struct, frozen=True, order=True):
    """One published state of the policy.

    Attributes:
        epoch: number of the run's incarnation, from 1.
        step: optimizer step after which the weights were taken, from 0.
    """

    epoch: int
    step: int

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.step < 0:
            msg = f"a policy version has no negative parts: epoch={self.epoch}, step={self.step}"
            raise ValueError(msg)

    def __str__(self) -> str:
        return f"e{self.epoch}.s{self.step}"

    @classmethod
    def parse(cls, text: str) -> "PolicyVersion":
        """Read `e<epoch>.s<step>`; anything else is a ValueError."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            msg = f"not a policy version: {text!r} (expected e<epoch>.s<step>, such as e1.s0)"
            raise ValueError(msg)
        return cls(int(match[1]), int(match[2]))

    def next_step(self) -> "PolicyVersion":
        """The version after one more optimizer step."""
        return PolicyVersion(self.epoch, self.step + 1)

    def next_epoch(self) -> "PolicyVersion":
        """The version of the same weights after the run was resumed."""
        return PolicyVersion(self.epoch + 1, self.step)


class VersionStore:
    """The last version of a run, in a small file that survives a crash.

    Written by the controller only, before a version is announced to anybody.
    """

    def __init__(self, path: Path) -> None:
        """Read the last version, if there is one; ConfigError if the file is damaged."""
        self._path = path
        self._current = self._read()

    @property
    def current(self) -> PolicyVersion | None:
        """The last version recorded, or None in a new run."""
        return self._current

    def record(self, version: PolicyVersion) -> None:
        """Persist `version`; StaleVersionError unless it is newer than the current one."""
        if self._current is not None and version <= self._current:
            msg = f"version {version} is not newer than {self._current}, recorded in {self._path}"
            raise StaleVersionError(msg)
        self._write(version)
        self._current = version

    def _read(self) -> PolicyVersion | None:
        if not self._path.exists():
            return None
        try:
            return PolicyVersion.parse(json.loads(self._path.read_text())["version"])
        except (ValueError, TypeError, LookupError) as error:
            msg = f"{self._path} does not hold a version ({error}); a run cannot go on from it"
            raise ConfigError(msg) from error

    def _write(self, version: PolicyVersion) -> None:
        staged = self._path.with_suffix(".tmp")
        with staged.open("w") as file:
            json.dump({"version": str(version)}, file)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(self._path)
        sync_path(self._path.parent)
