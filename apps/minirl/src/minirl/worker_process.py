"""What every worker process does first: output into a file, business lines to the driver."""

import logging
import os
from pathlib import Path

import msgspec

from minirl.business_log import ForwardingHandler, LogAddress, attach


class ProcessSettings(msgspec.Struct, frozen=True):
    """How a worker process reports.

    Attributes:
        log_dir: directory for its output.
        log_address: where its business lines go.
        name: name of its log file.
    """

    log_dir: str
    log_address: LogAddress
    name: str = "worker"

    def named(self, name: str) -> "ProcessSettings":
        """The same, for the process called `name`."""
        return msgspec.structs.replace(self, name=name)

    @property
    def log_path(self) -> Path:
        """The file of its output, on its own node."""
        return Path(self.log_dir) / f"{self.name}.log"


def prepare_process(settings: ProcessSettings) -> None:
    """Redirect stdout and stderr into `<log_dir>/<name>.log` and attach the business log.

    Descendants inherit the redirection, so an engine's own noise lands in the same file.
    """
    path = settings.log_path
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    attach(ForwardingHandler(settings.log_address))
    logging.captureWarnings(capture=True)
