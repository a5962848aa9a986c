"""Where the numbers of a run go besides its own files: `trainer.report_to`.

TensorBoard and Weights & Biases are here; anybody adds one with an entry point in the group
`minirl.reporters` that names a class, or function, called as `factory(run_dir, config)`.
"""

import importlib
import importlib.util
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol

from rl_core.errors import ComponentLoadError, ComponentNotFoundError, ConfigError, in_one_line
from rl_core.metadata import nearest

_logger = logging.getLogger(__name__)

GROUP = "minirl.reporters"
_KEY = "trainer.report_to"


class Reporter(Protocol):
    """Takes the numbers of a run as they come."""

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of one step, or of an evaluation (`eval/...`) after so many steps; all finite."""

    def close(self) -> None:
        """The run has ended."""


Factory = Callable[[Path, Mapping[str, Any]], Reporter]
"""Makes a reporter from the run's directory and its resolved configuration in plain values."""


class TensorBoard:
    """Event files in the run's directory."""

    def __init__(self, run_dir: Path, _config: Mapping[str, Any]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run_dir))

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Reporter.report`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        )

    def close(self) -> None:
        """See `Reporter.close`."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the project `minirl`; wandb's environment variables (`WANDB_MODE`, ...) hold."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        # The terminal is for the run's own log, and nobody may be there to answer a question.
        settings = wandb.Settings(silent=True, login_timeout=30)
        self._run = wandb.init(
            project="minirl",
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(config),
            settings=settings,
        )

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Reporter.report`."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """See `Reporter.close`."""
        self._run.finish()


_BUILT_IN: Mapping[str, Factory] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check_reporters(names: Sequence[str]) -> None:
    """Whether all of `names` can be made.

    Errors: ConfigError for a name that nobody provides, with the nearest; ComponentNotFoundError
    says what to install; ComponentLoadError if a provider cannot be imported.
    """
    for name in names:
        _factory(name)
    if "wandb" in names and importlib.util.find_spec("wandb") is None:
        msg = f"{_KEY}=wandb: wandb is not installed: pip install 'rl-minirl[wandb]'"
        raise ComponentNotFoundError(msg)


class Reporters:
    """Those that a run has; one that fails is left out from then on, and the run goes on."""

    def __init__(self, names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> None:
        """Make them; the errors of `check_reporters`."""
        self._reporters: dict[str, Reporter] = {}
        for name in names:
            self._guarded(name, partial(self._add, name, _factory(name), run_dir, config))

    def report(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Give the finite numbers of `metrics` to all."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for name, reporter in list(self._reporters.items()):
            self._guarded(name, partial(reporter.report, step, numbers))

    def close(self) -> None:
        """Tell all that the run has ended."""
        for name, reporter in list(self._reporters.items()):
            self._guarded(name, reporter.close)
        self._reporters.clear()

    def _add(self, name: str, factory: Factory, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._reporters[name] = factory(run_dir, config)

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - somebody else's code, and not worth a run
            self._reporters.pop(name, None)
            why = f"{type(error).__name__}: {in_one_line(error)}"
            _logger.warning("%s: %s gets nothing any more: %s", _KEY, name, why)


def _factory(name: str) -> Factory:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    found = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if not found:
        known = sorted({*_BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})
        msg = f"{_KEY}={name}: must be one of {', '.join(known)}, or a name in the entry points "
        raise ConfigError(f"{msg}{GROUP}; the nearest is {nearest(name, known)}")
    return _loaded(found[0])


def _loaded(entry: EntryPoint) -> Factory:
    try:
        factory: Factory = entry.load()
    except Exception as error:
        msg = f"{_KEY}={entry.name} ({entry.value}) cannot be loaded: {in_one_line(error)}"
        raise ComponentLoadError(msg) from error
    return factory
