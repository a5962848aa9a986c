"""What a run leaves in its directory."""

import fcntl
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from minirl.config import MiniRLConfig, as_yaml
from minirl.reporters import Reporters
from minirl.run_records import CONFIG, METRICS, SUMMARY, TRAJECTORIES
from minirl.run_state import NOTHING_DONE, RunState
from minirl.trajectories import Trajectory
from rl_core.errors import ConfigError, in_one_line

_logger = logging.getLogger(__name__)


def create_run_dir(configured: str | None) -> Path:
    """The directory of this run, new or empty of results; ConfigError if it can't be written."""
    name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
    path = Path(configured) if configured is not None else Path("runs") / name
    if (path / METRICS).exists():
        msg = (
            f"trainer.run_dir={path} already holds a run; choose another directory, or go on with "
            "it by trainer.resume=auto"
        )
        raise ConfigError(msg)
    return open_run_dir(path)


def open_run_dir(path: Path) -> Path:
    """The directory with those that a run needs in it; ConfigError if it can't be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        for child in ("logs", "checkpoints"):
            (path / child).mkdir(exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"trainer.run_dir={path} is not writable: {reason}") from error
    return path.resolve()


@contextmanager
def run_lock(path: Path) -> Iterator[None]:
    """Keep other processes from writing into a run directory; gone with this process.

    ConfigError if one does.
    """
    with (path / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"trainer.run_dir={path}: another run writes there") from None
        yield


class RunOutput:
    """Writes metrics, trajectories and the summary of one run."""

    def __init__(self, path: Path, config: MiniRLConfig, done: RunState = NOTHING_DONE) -> None:
        """Append to what `path` holds; `done` is where the run that goes on stands."""
        self.path = path
        (path / CONFIG).write_text(as_yaml(config))
        self._metrics = (path / METRICS).open("a", encoding="utf-8")
        self._trajectories = (path / TRAJECTORIES).open("ab")
        self._reporters = Reporters(config.trainer.report_to, path, asdict(config), done.step)
        self._encoder = msgspec.json.Encoder()
        self.rewards = list(done.rewards)

    def write_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics; numbers also go to `trainer.report_to`."""
        self._metrics.write(json.dumps({"step": step, **metrics}) + "\n")
        self._metrics.flush()
        self.rewards.append(metrics["reward/mean"])
        self._reporters.report(step, metrics)

    def report_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of the held-out samples after `step` steps, for `trainer.report_to` only."""
        self._reporters.report(step, {f"eval/{name}": value for name, value in metrics.items()})

    def write_trajectories(self, trajectories: Iterable[Trajectory]) -> None:
        """Append samples, a line each."""
        lines = [self._encoder.encode(trajectory) + b"\n" for trajectory in trajectories]
        self._trajectories.write(b"".join(lines))
        self._trajectories.flush()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """`summary.json`, replaced as a whole."""
        staged = self.path / f"{SUMMARY}.tmp"
        staged.write_bytes(msgspec.json.format(self._encoder.encode(summary)) + b"\n")
        staged.replace(self.path / SUMMARY)

    def reward_summary(self) -> dict[str, float | None]:
        """Reward of the first step and mean of the last five."""
        last = self.rewards[-5:]
        return {
            "first": self.rewards[0] if self.rewards else None,
            "last": sum(last) / len(last) if last else None,
        }

    def plot_rewards(self, evaluations: Sequence[tuple[int, float]]) -> None:
        """`reward.png`: reward by step, with the held-out evaluations as (step, reward)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(range(1, len(self.rewards) + 1), self.rewards, label="training, mean of a step")
        if evaluations:
            steps, rewards = zip(*evaluations, strict=True)
            axes.plot(steps, rewards, "o--", label="held out")
        axes.set(xlabel="step", ylabel="reward")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self.path / "reward.png", dpi=120)

    def close(self) -> None:
        """Flush and close the files; what a full disk does not take is told, not raised."""
        for file in (self._metrics, self._trajectories):
            try:
                file.close()
            except OSError as error:
                _logger.warning("The end of %s is not written: %s", file.name, in_one_line(error))
        self._reporters.close()

    def __enter__(self) -> "RunOutput":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
