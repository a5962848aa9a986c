"""The progress view on a terminal; nothing where the output is piped."""

from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ProgressView:
    """A bar with step, phase and reward below the log lines."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self.console = Console(file=stream) if stream.isatty() else None
        self._progress: Progress | None = None
        self._reward = ""
        if self.console is not None:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[phase]:<13}"),
                TextColumn("{task.fields[reward]}"),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            )
            self._task = self._progress.add_task("run", total=steps, phase="starting", reward="")

    def update(self, step: int, phase: str, reward: float | None) -> None:
        """Show that `step` is in `phase`; `done` completes it."""
        if self._progress is None:
            return
        if reward is not None:
            self._reward = f"reward {reward:.3f}"
        completed = step if phase == "done" else step - 1
        self._progress.update(self._task, completed=completed, phase=phase, reward=self._reward)

    def __enter__(self) -> "ProgressView":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
