"""Rows of a run that goes on from a checkpoint: what was done after it is taken out."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

METRICS, TRAJECTORIES = "metrics.jsonl", "trajectories.jsonl"
CONFIG, SUMMARY = "config.yaml", "summary.json"


class _Row(msgspec.Struct):
    """What tells a row of either file from those after the checkpoint."""

    step: int | None = None
    index: int | None = None


def cut_rows(run_dir: Path, step: int, samples: int, abandoned: Path) -> int:
    """Move what was written after `step`, and a row that was cut short, into `abandoned`.

    Nothing is deleted: these rows say what the engine served and sampled, although the run that
    goes on does not build on it.

    Args:
        run_dir: of the run.
        step: training steps done at the checkpoint.
        samples: rows of `trajectories.jsonl` at the checkpoint.
        abandoned: directory for the rows; made if there are any.

    Returns:
        The number of samples left.
    """
    _cut(run_dir / METRICS, lambda row: row.step is not None and row.step <= step, abandoned)
    return _cut(
        run_dir / TRAJECTORIES, lambda row: row.index is not None and row.index < samples, abandoned
    )


def _cut(path: Path, is_kept: Callable[[_Row], bool], abandoned: Path) -> int:
    """Cut after the last row of those at the beginning that are kept; how many these are."""
    if not path.exists():
        return 0
    end = rows = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n") or not is_kept(_decode(line)):
                break
            end, rows = end + len(line), rows + 1
        if end < file.seek(0, os.SEEK_END):
            file.seek(end)
            abandoned.mkdir(parents=True, exist_ok=True)
            with (abandoned / path.name).open("wb") as target:
                shutil.copyfileobj(file, target)
                target.flush()
                os.fsync(target.fileno())
            file.truncate(end)
    return rows


def _decode(line: bytes) -> _Row:
    try:
        return msgspec.json.decode(line, type=_Row)
    except msgspec.MsgspecError:
        return _Row()
