"""Runs `minirl` once for each line of standard input, in a fork of this process.

A line is JSON: arguments, log file, working directory. This process has imported what a run imports
before it refuses its arguments, by one that is refused late; starting a new interpreter for each
would take most of the time. Prints the exit code of each; one that hangs is ended by SIGALRM.
"""

import contextlib
import io
import json
import os
import signal
import sys

from minirl.main import main, run

LIMIT_S = 120


def _run(arguments: list[str], log: str, directory: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.chdir(directory)
    sys.argv = ["minirl", *arguments]
    run()


with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    main(["data.path=/no/such/prompts.parquet"])

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT_S)
        _run(*json.loads(line))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
    sys.stdout.flush()
