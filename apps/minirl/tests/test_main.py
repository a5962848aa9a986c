"""The command line as a process: what `minirl` does at its end."""

import os
import subprocess
import sys


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
