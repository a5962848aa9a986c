"""The command line as a process: what `minirl` does at its end."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from minirl import main
from minirl.output_redirection import redirected_output


def test_whoever_reads_may_have_seen_enough():
    """As in `minirl doctor | head -1`: no trace, and the exit code that a shell expects."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "minirl.main", "--help"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("dev_mode", [False, True])
def test_what_nobody_has_foreseen_is_one_line(monkeypatch, capsys, dev_mode):
    """With the trace above it, where Python's development mode asks for more."""

    def fail(_):
        raise KeyError("reward")

    monkeypatch.setitem(main.COMMANDS, "show", fail)
    flags = SimpleNamespace(dev_mode=dev_mode)
    monkeypatch.setattr(main, "sys", SimpleNamespace(**{**vars(sys), "flags": flags}))
    assert main.main(["show"]) == 1
    *trace, line = capsys.readouterr().err.splitlines()
    assert line.startswith("[MiniRL] error: KeyError: 'reward'; ")
    assert bool(trace) is dev_mode


def test_where_the_trace_is_is_told(monkeypatch, tmp_path, capfd):
    # pytest's own stream is not what is redirected
    monkeypatch.setattr(sys, "stderr", os.fdopen(2, "w", buffering=1, closefd=False))

    def fail(_):
        with redirected_output(tmp_path / "log"):
            raise OSError(28, "no space", "config.yaml")

    monkeypatch.setitem(main.COMMANDS, "train", fail)
    assert main.main([]) == 1
    cause = "OSError: [Errno 28] no space: 'config.yaml'"
    told = f"[MiniRL] error: {cause}; the trace is in {tmp_path / 'log'}\n"
    assert capfd.readouterr().err == told
