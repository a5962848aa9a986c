"""The program in a package's README, run as a reader would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

ERROR_CHARACTERS = 4000


def run_program(readme: Path, directory: Path, *arguments: str, timeout_s: float = 120) -> str:
    """Run the only Python block of `readme` in `directory`; what it prints.

    AssertionError with the end of its standard error if it fails.
    """
    [program] = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    path = directory / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        # Where several processes print, the pieces of their lines would mix unbuffered.
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert done.returncode == 0, done.stderr[-ERROR_CHARACTERS:]
    return done.stdout
