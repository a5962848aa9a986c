"""What a reward function prints: kept aside until the run has a directory for it."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass
class RewardLog:
    """The function is loaded, and may print, before it is clear that there will be a run.

    Attributes:
        path: file that the function's process writes to.
        target: where it goes in the end; None throws it away.
    """

    path: Path
    target: Path | None = None


@contextlib.contextmanager
def reward_log() -> Iterator[RewardLog]:
    """A log for the length of the block; its process must have ended before the block does."""
    descriptor, name = tempfile.mkstemp(prefix="minirl-reward-", suffix=".log")
    os.close(descriptor)
    log = RewardLog(Path(name))
    try:
        yield log
    finally:
        if log.target is not None and log.path.stat().st_size > 0:
            shutil.move(log.path, log.target)
        else:
            log.path.unlink(missing_ok=True)
