"""Training checkpoints and the final model of a run."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from minirl.run_state import ACTOR, RunState
from rl_core.durable import sync_path
from rl_core.logs import kv

_logger = logging.getLogger(__name__)

_PREFIX = "step_"
_STAGED, _REMOVED = ".staged", ".removed"

WRITE_TIMEOUT_S = 600.0
"""Deadline of the wait for a checkpoint that is being written."""


class StateWriter(Protocol):
    """Saves the state of all actor ranks."""

    def begin(self, path: Path) -> None:
        """Begin to write the state of this moment as `path`."""
        ...

    def written(self) -> bool:
        """Whether what was begun is there, or has failed."""
        ...

    def finish(self, timeout_s: float) -> None:
        """Wait for it; its error, if it failed."""
        ...


class Checkpoints:
    """The `checkpoints/` directory: `step_<n>` for resuming, `final` for serving.

    A checkpoint is begun, written behind the training, and gets its name when all of it is there:
    a directory with such a name is complete. Older ones are removed only after that.
    """

    def __init__(self, directory: Path, keep_last: int, writer: StateWriter) -> None:
        self._directory = directory
        self._keep_last = keep_last
        self._writer = writer
        self._under_way: RunState | None = None

    def begin(self, state: RunState) -> None:
        """Begin to save the actor ranks' present state; the one before is waited for first."""
        self.finish(WRITE_TIMEOUT_S)
        staged = _hidden(self._path(state.step), _STAGED)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        self._writer.begin(staged / ACTOR)
        self._under_way = state

    def settle(self) -> None:
        """Give what was begun its name if it is written by now; does not wait."""
        if self._under_way is not None and self._writer.written():
            self.finish(WRITE_TIMEOUT_S)

    def finish(self, timeout_s: float) -> None:
        """Wait for what was begun and give it its name; nothing to do if nothing was.

        Errors: TransferTimeoutError after `timeout_s` seconds, TrainError if writing failed.
        """
        state = self._under_way
        if state is None:
            return
        self._writer.finish(timeout_s)
        self._under_way = None
        path = self._path(state.step)
        staged = _hidden(path, _STAGED)
        state.write(staged)
        sync_path(staged)
        _remove(path)
        staged.rename(path)
        sync_path(self._directory)
        for old in complete(self._directory)[: -self._keep_last]:
            _remove(old)
        _logger.info("Checkpoint saved: %s", kv(step=state.step, path=path))

    def save_final(self, write: Callable[[Path], object]) -> Path:
        """Let `write` save the model as a Hugging Face directory."""
        path = self._directory / "final"
        write(path)
        _logger.info("Model saved: %s", kv(path=path))
        return path

    def _path(self, step: int) -> Path:
        return self._directory / f"{_PREFIX}{step:06d}"


def complete(directory: Path) -> list[Path]:
    """Training checkpoints that got their name, oldest first."""
    return sorted(directory.glob(f"{_PREFIX}[0-9]*"), key=step_of)


def step_of(path: Path) -> int:
    """The number in a checkpoint's name; -1 if there is none."""
    digits = path.name.removeprefix(_PREFIX)
    return int(digits) if digits.isdecimal() else -1


def half_written(directory: Path) -> list[Path]:
    """What a run that was killed had not finished writing."""
    return sorted(directory.glob(f".{_PREFIX}*{_STAGED}"))


def clean(directory: Path) -> None:
    """Remove what a run that was killed left half written or half removed."""
    for kind in (_STAGED, _REMOVED):
        for path in directory.glob(f".{_PREFIX}*{kind}"):
            shutil.rmtree(path)


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}{kind}")


def _remove(path: Path) -> None:
    """Take the name away first: half removed must not look like complete."""
    if path.exists():
        removed = _hidden(path, _REMOVED)
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)
        shutil.rmtree(removed)
