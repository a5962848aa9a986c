"""Where the output of an engine's processes goes."""

import logging
import os

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def redirect_output(log_dir: str, name: str, logger: str | None = None) -> None:
    """Send this process's stdout and stderr to a file.

    Args:
        log_dir: directory of the file, made if need be.
        name: of the file.
        logger: one whose lines are to go there too, whatever handlers it has: a forked process
            has those of its parent, with which it would write into the parent's file.
    """
    os.makedirs(log_dir, exist_ok=True)
    descriptor = os.open(os.path.join(log_dir, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    if logger is not None:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        logging.getLogger(logger).handlers[:] = [handler]
