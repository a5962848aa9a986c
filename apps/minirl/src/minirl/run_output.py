"""What a run leaves in its directory."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from minirl.config import MiniRLConfig, as_yaml
from minirl.reporters import Reporters
from minirl.trajectories import Trajectory
from rl_core.errors import ConfigError


def create_run_dir(configured: str | None) -> Path:
    """The directory of this run, new or empty of results; ConfigError if it can't be written."""
    name = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")[:-3]
    path = Path(configured) if configured is not None else Path("runs") / name
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / "metrics.jsonl").exists():
            msg = f"trainer.run_dir={path} already holds a run; choose another directory"
            raise ConfigError(msg)
        for child in ("logs", "checkpoints"):
            (path / child).mkdir(exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"trainer.run_dir={path} is not writable: {reason}") from error
    return path.resolve()


class RunOutput:
    """Writes metrics, trajectories and the summary of one run."""

    def __init__(self, path: Path, config: MiniRLConfig) -> None:
        self.path = path
        (path / "config.yaml").write_text(as_yaml(config))
        self._metrics = (path / "metrics.jsonl").open("a", encoding="utf-8")
        self._trajectories = (path / "trajectories.jsonl").open("ab")
        self._reporters = Reporters(config.trainer.report_to, path, asdict(config))
        self._encoder = msgspec.json.Encoder()
        self.rewards: list[float] = []

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
        staged = self.path / "summary.json.tmp"
        staged.write_bytes(msgspec.json.format(self._encoder.encode(summary)) + b"\n")
        staged.replace(self.path / "summary.json")

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
        """Flush and close the files."""
        self._metrics.close()
        self._trajectories.close()
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
