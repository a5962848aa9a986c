import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.engine
def test_program_of_the_readme_moves_a_state_dict(tmp_path):
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text(programs[0])
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        # Both processes print: unbuffered, the pieces of their lines would mix.
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"e1.s0 {'weight': \[\[.*\]\], 'bias': \[.*\]}", done.stdout)
    assert "payload_bytes=40" in done.stdout
