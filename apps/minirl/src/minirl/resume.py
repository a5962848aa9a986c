"""Finds the checkpoint that `trainer.resume` means, and the run directory that goes on."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from minirl.checkpoints import clean, complete, half_written, step_of
from minirl.config import MiniRLConfig
from minirl.resume_settings import check_settings
from minirl.run_files import runs_in
from minirl.run_records import METRICS, SUMMARY, TRAJECTORIES, cut_rows
from minirl.run_state import ACTOR, NOTHING_DONE, VERSION_FILE, RunState, read_state
from rl_core.errors import ConfigError
from rl_core.logs import kv
from rl_core.versions import VersionStore

_logger = logging.getLogger(__name__)

AUTO = "auto"
RUNS = Path("runs")
CHECKPOINTS, ABANDONED = "checkpoints", "abandoned"


@dataclass(frozen=True)
class Beginning:
    """Where a run begins.

    Attributes:
        state: what was done before.
        epoch: of this incarnation of the run.
        actor: what the actor ranks load; None for the model as it is.
    """

    state: RunState
    epoch: int
    actor: Path | None


FRESH = Beginning(NOTHING_DONE, 1, None)


class Skipped(NamedTuple):
    """A checkpoint that cannot be resumed from, and why."""

    path: Path
    why: str


@dataclass(frozen=True)
class Resumption:
    """How a run goes on.

    Attributes:
        state: of the run; `NOTHING_DONE` if it was killed before its first checkpoint.
        checkpoint: directory to load; None then.
        run_dir: of the run that goes on; None for a checkpoint that lies by itself or is to go on
            in another directory: then this is a new run directory, with the rows after it.
        skipped: newer than `checkpoint`, but not whole.
    """

    state: RunState
    checkpoint: Path | None
    run_dir: Path | None
    skipped: tuple[Skipped, ...] = ()

    def check(self, config: MiniRLConfig, model: Path) -> None:
        """ConfigError naming the first setting that contradicts the checkpoint."""
        if self.checkpoint is not None:
            check_settings(self.state, config, model, self.checkpoint)

    def begin(self, run_dir: Path) -> Beginning:
        """Make the directory ready to be appended to.

        Rows and checkpoints after the one that is resumed from move to `abandoned/e<epoch>`, and so
        does the summary of what ended before; what was half-written is removed.
        """
        stored = VersionStore(run_dir / VERSION_FILE).current
        epoch = max(self.state.epoch, stored.epoch if stored is not None else 0) + 1
        abandoned = run_dir / ABANDONED / f"e{epoch}"
        checkpoints = run_dir / CHECKPOINTS
        clean(checkpoints)
        for path in complete(checkpoints):
            if step_of(path) > self.state.step:
                abandoned.mkdir(parents=True, exist_ok=True)
                path.rename(abandoned / path.name)
        if (run_dir / SUMMARY).exists():
            abandoned.mkdir(parents=True, exist_ok=True)
            (run_dir / SUMMARY).rename(abandoned / SUMMARY)
        found = cut_rows(run_dir, self.state.step, self.state.samples, abandoned)
        if self.run_dir is not None and found < self.state.samples:
            rows = kv(found=found, expected=self.state.samples)
            _logger.warning("%s lacks rows of before the checkpoint: %s", TRAJECTORIES, rows)
        return Beginning(
            self.state, epoch, None if self.checkpoint is None else self.checkpoint / ACTOR
        )


def find_resumption(config: MiniRLConfig) -> Resumption | None:
    """What `trainer.resume` finds; None where there is nothing yet, or nothing was asked for.

    Errors: ConfigError if a path that was given is no checkpoint, nor a run that has one.
    """
    wanted, run_dir = config.trainer.resume, config.trainer.run_dir
    if wanted is None:
        return None
    if config.trainer.mock:
        raise ConfigError(f"trainer.resume={wanted}: trainer.mock=true trains nothing")
    if config.debug.rollout_only or config.debug.train_only is not None:
        raise ConfigError(f"trainer.resume={wanted}: half a loop (debug) cannot be resumed")
    if wanted == AUTO:
        directory = Path(run_dir) if run_dir is not None else _newest_run()
        if directory is None or not (directory / METRICS).exists():
            return None
        return _newest(directory.resolve())
    path = Path(wanted).resolve()
    if not path.is_dir():
        raise ConfigError(f"trainer.resume={wanted}: no such directory; give one, or auto")
    if (path / CHECKPOINTS).is_dir():
        found = _newest(path)
        if found.checkpoint is None:
            why = f" ({found.skipped[0].why})" if found.skipped else ""
            raise ConfigError(f"trainer.resume={wanted}: the run has no whole checkpoint{why}")
    else:
        found = Resumption(_read(wanted, path), path, _run_of(path))
    if run_dir is not None and found.run_dir != Path(run_dir).resolve():
        return Resumption(found.state, found.checkpoint, None, found.skipped)
    return found


def _read(wanted: str, path: Path) -> RunState:
    try:
        return read_state(path)
    except ConfigError as error:
        raise ConfigError(f"trainer.resume={wanted}: {error}") from error


def _newest(run_dir: Path) -> Resumption:
    """The newest whole checkpoint of a run; `NOTHING_DONE` without any."""
    directory = run_dir / CHECKPOINTS
    skipped = [Skipped(path, "half-written") for path in half_written(directory)]
    for path in reversed(complete(directory)):
        try:
            state = read_state(path)
        except ConfigError as error:
            skipped.append(Skipped(path, str(error)))
        else:
            return Resumption(state, path, run_dir, tuple(skipped))
    return Resumption(NOTHING_DONE, None, run_dir, tuple(skipped))


def _newest_run() -> Path | None:
    """The directory of `runs/` whose run was started last, of those that have metrics."""
    runs = reversed(runs_in(RUNS))
    return next((path for path in runs if (path / METRICS).exists()), None)


def _run_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in."""
    run_dir = checkpoint.parent.parent
    inside = checkpoint.parent.name == CHECKPOINTS and (run_dir / METRICS).exists()
    return run_dir if inside else None
