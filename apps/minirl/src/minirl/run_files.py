"""Reading what a run has left, or leaves while it goes on."""

import json
from pathlib import Path
from typing import Any

from minirl.run_records import CONFIG, METRICS, SUMMARY, TRAJECTORIES
from rl_core.errors import ConfigError

_TAIL_BYTES = 1 << 20


class RunFiles:
    """The directory of one run; a line that is still being written is left out."""

    def __init__(self, path: Path) -> None:
        """Errors: ConfigError if `path` is not the directory of a run."""
        if not (path / CONFIG).is_file():
            raise ConfigError(f"{path}: not the directory of a run (it has no {CONFIG})")
        self.path = path

    def summary(self) -> dict[str, Any] | None:
        """`summary.json`; None before the run has ended."""
        try:
            read: dict[str, Any] = json.loads((self.path / SUMMARY).read_text("utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(f"{self.path / SUMMARY}: not JSON: {error}") from error
        return read

    def metrics(self) -> list[dict[str, Any]]:
        """All steps, in order."""
        try:
            data = (self.path / METRICS).read_bytes()
        except FileNotFoundError:
            return []
        return [record for line in data.splitlines() if (record := _record(line)) is not None]

    def last_samples(self, count: int) -> list[dict[str, Any]]:
        """One trajectory of each of the newest `count` prompts, oldest first."""
        try:
            with (self.path / TRAJECTORIES).open("rb") as file:
                # The file may be large; its first line here is then a part of one.
                file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
                lines = file.read().splitlines()
        except FileNotFoundError:
            return []
        newest: dict[int, dict[str, Any]] = {}
        for line in reversed(lines):
            record = _record(line)
            if record is not None:
                newest.setdefault(record["group_index"], record)
            if len(newest) == count:
                break
        return list(reversed(newest.values()))


def latest_run(parent: Path) -> Path:
    """The newest run below `parent`; ConfigError if there is none."""
    runs = runs_in(parent)
    if not runs:
        raise ConfigError(f"show: no run in {parent}/; give the directory of one")
    return runs[-1]


def runs_in(parent: Path) -> list[Path]:
    """Directories of runs below `parent`, whatever their names; the one started last is last."""

    def started(path: Path) -> tuple[int, Path]:
        return (path / CONFIG).stat().st_mtime_ns, path

    return sorted((path.parent for path in parent.glob(f"*/{CONFIG}")), key=started)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
