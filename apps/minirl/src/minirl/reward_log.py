"""What a reward function prints: kept aside until the run has a directory for it."""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl_core.errors import in_one_line

_logger = logging.getLogger(__name__)


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
        try:
            if log.target is not None and log.path.stat().st_size > 0:
                shutil.move(log.path, log.target)
        except OSError as error:
            _logger.warning("%s is not written: %s", log.target, in_one_line(error))
        finally:
            log.path.unlink(missing_ok=True)
