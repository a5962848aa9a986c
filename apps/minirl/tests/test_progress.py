"""What a terminal shows of a run, and that a pipe shows nothing of it."""

import io
import logging
import os
import re
import time

import pytest

from minirl.business_log import ConsoleHandler
from minirl.progress import ProgressView

WAIT_S = 20.0


class Terminal:
    """The end of a pseudo-terminal that a person would look at."""

    def __init__(self):
        self._mine, theirs = os.openpty()
        os.set_blocking(self._mine, False)
        self.stream = os.fdopen(theirs, "w")
        self.text = ""

    def read(self):
        """All that was shown so far, without colours and movements of the cursor."""
        try:
            raw = os.read(self._mine, 1 << 16).decode()
        except BlockingIOError:
            raw = ""
        self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).replace("\r", "\n")
        return self.text

    def await_(self, pattern):
        """Until a line is shown that matches."""
        until = time.monotonic() + WAIT_S
        while not re.search(pattern, self.read()):
            assert time.monotonic() < until, self.text
            time.sleep(0.02)

    def close(self):
        self.stream.close()
        os.close(self._mine)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    made = Terminal()
    yield made
    made.close()


def told(handler, text):
    handler.emit(logging.LogRecord("minirl", logging.INFO, "", 0, text, (), None))


def test_a_terminal_shows_step_phase_and_reward_below_the_log(terminal):
    with ProgressView(3, terminal.stream) as view:
        terminal.await_(r"step 0/3 .* starting")
        view.update(1, "generate", None)
        terminal.await_(r"step 0/3 .* generate ")
        view.update(1, "done", 0.25)
        terminal.await_(r"step 1/3 .* done +reward 0\.250")
        view.update(2, "update_actor", None)
        terminal.await_(r"step 1/3 .* update_actor +reward 0\.250")
        told(ConsoleHandler(terminal.stream, view.console), "a line of the log")
        terminal.await_(r"\[MiniRL\] a line of the log\s+step 1/3 ")
    shown = len(terminal.read())
    view.update(3, "done", 1.0)
    time.sleep(0.3)
    assert len(terminal.read()) == shown


def test_a_pipe_shows_the_log_only():
    stream = io.StringIO()
    with ProgressView(3, stream) as view:
        view.update(1, "generate", None)
        view.update(1, "done", 0.25)
        told(ConsoleHandler(stream, view.console), "a line of the log")
    assert stream.getvalue() == "[MiniRL] a line of the log\n"
