"""The actor ranks' part of a training checkpoint."""

from pathlib import Path

from minirl.worker_group import WorkerGroup

_COPY_TIMEOUT_S = 600.0
_LOAD_TIMEOUT_S = 1800.0
_ANSWERS_S = 60.0
_MARGIN_S = 10.0


class ActorState:
    """Lets all actor ranks together write their state and read it back."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    def begin(self, path: Path) -> None:
        """Begin to write the state of this moment as `path`; the ranks go on meanwhile."""
        self._workers.call("begin_checkpoint", str(path), timeout_s=_COPY_TIMEOUT_S)

    def written(self) -> bool:
        """Whether what was begun is there, or has failed; rank 0 is the last to know."""
        return bool(self._workers.call_rank(0, "checkpoint_written", timeout_s=_ANSWERS_S))

    def finish(self, timeout_s: float) -> None:
        """Wait for it; TransferTimeoutError, or why it failed."""
        self._workers.call("finish_checkpoint", timeout_s, timeout_s=timeout_s + _MARGIN_S)

    def load(self, path: Path) -> None:
        """Restore what any number of ranks wrote as `path`."""
        self._workers.call("load_checkpoint", str(path), timeout_s=_LOAD_TIMEOUT_S)
