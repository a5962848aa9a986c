"""Training checkpoints and the final model of a run."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from rl_core.logs import kv

_logger = logging.getLogger(__name__)

_PREFIX = "step_"


class Checkpoints:
    """The `checkpoints/` directory: `step_<n>` for resuming, `final` for serving.

    The train engine writes into a staged directory and renames it, so a directory that exists is
    complete; older ones are removed only after a newer one is.
    """

    def __init__(self, directory: Path, keep_last: int) -> None:
        self._directory = directory
        self._keep_last = keep_last

    def save(self, step: int, write: Callable[[Path], object]) -> Path:
        """Let `write` save training state for `step`; then drop all but the last few."""
        path = self._directory / f"{_PREFIX}{step:06d}"
        write(path)
        for old in self.steps()[: -self._keep_last]:
            shutil.rmtree(old)
        _logger.info("Checkpoint saved: %s", kv(step=step, path=path))
        return path

    def save_final(self, write: Callable[[Path], object]) -> Path:
        """Let `write` save the model as a Hugging Face directory."""
        path = self._directory / "final"
        write(path)
        _logger.info("Model saved: %s", kv(path=path))
        return path

    def steps(self) -> list[Path]:
        """Complete training checkpoints, oldest first."""
        return sorted(self._directory.glob(f"{_PREFIX}[0-9]*"))
