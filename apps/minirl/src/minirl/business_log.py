"""The `[MiniRL]` log: one stream, in order, whichever process a line comes from.

Every process attaches one handler to our own loggers (never to root). In the driver it prints; in
a worker it sends each line over an authenticated channel and waits until the driver has printed
it, so that lines keep the order in which things happened across processes.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TextIO

import msgspec
from rich.console import Console

from rl_core import plugins
from rl_core.channel import Channel, Listener, connect
from rl_core.deadlines import Deadline
from rl_core.errors import MessageError, TransferError

PREFIX = "[MiniRL] "
_WAIT_S = 10.0
_IDLE_S = 7 * 24 * 3600.0
_POLL_S = 1.0


class Line(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """One log record, on its way to the driver."""

    level: int
    logger: str
    text: str


class Printed(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The driver has printed the line."""


class LogAddress(msgspec.Struct, frozen=True):
    """Where workers send their lines, and the key that proves that they may."""

    address: str
    key: bytes


def our_loggers() -> list[logging.Logger]:
    """The loggers of the app, of rl-core and of every installed backend."""
    names = {"minirl", "rl_core"}
    for group in (plugins.TRAIN_ENGINES, plugins.CHECKPOINT_ENGINES, plugins.ROLLOUT_BACKENDS):
        names |= {
            entry.value.partition(":")[0].partition(".")[0] for entry in entry_points(group=group)
        }
    return [logging.getLogger(name) for name in sorted(names)]


def attach(handler: logging.Handler) -> None:
    """Make `handler` the only destination of our loggers, from INFO on."""
    for logger in our_loggers():
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


class PrefixFormatter(logging.Formatter):
    """`[MiniRL] ` before every line of a message; exceptions are not rendered."""

    def format(self, record: logging.LogRecord) -> str:
        """The message, each line prefixed."""
        return "\n".join(PREFIX + line for line in record.getMessage().splitlines())


class ConsoleHandler(logging.Handler):
    """Prints to a stream, above the progress view if one is shown on `console`."""

    def __init__(self, stream: TextIO | None = None, console: Console | None = None) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._console = console
        self.setFormatter(PrefixFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; a line that cannot be written, as on a full disk, ends no run."""
        text = self.format(record)
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        with contextlib.suppress(OSError):
            self._stream.write(text + "\n")
            self._stream.flush()


class ForwardingHandler(logging.Handler):
    """Sends records to the driver. Lines are dropped once the driver is gone."""

    def __init__(self, target: LogAddress) -> None:
        super().__init__()
        self._target = target
        self._channel: Channel | None = None
        self._gone = False

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record and wait until it is printed."""
        if self._gone:
            return
        deadline = Deadline.after(_WAIT_S)
        try:
            if self._channel is None:
                self._channel = connect(self._target.address, self._target.key, Printed, deadline)
            self._channel.send(Line(record.levelno, record.name, record.getMessage()), deadline)
            self._channel.receive(deadline)
        except (TransferError, MessageError):
            self._gone = True


class LogServer:
    """Receives workers' lines in the driver and hands them to the driver's loggers."""

    def __init__(self, key: bytes, host: str | None) -> None:
        """Listen on `host`, or on a local socket if None."""
        self._listener = Listener(host)
        self._key = key
        self.address = LogAddress(self._listener.address, key)
        self._thread = threading.Thread(target=self._accept, name="log-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop receiving."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                waiting = self._listener.poll(_POLL_S)
            except (OSError, ValueError):  # closed
                return
            if not waiting:
                continue
            try:
                channel = self._listener.accept(self._key, Line, Deadline.after(_WAIT_S))
            except (MessageError, TransferError):
                continue  # a stranger, or one that gave up
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        with channel, contextlib.suppress(TransferError, MessageError):
            for line in _lines(channel):
                logging.getLogger(line.logger).log(line.level, "%s", line.text)
                channel.send(Printed(), Deadline.after(_WAIT_S))


def _lines(channel: Channel) -> Iterator[Line]:
    while True:
        yield channel.receive(Deadline.after(_IDLE_S))
