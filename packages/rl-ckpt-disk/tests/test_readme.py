"""The program in the README runs."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_program_in_the_readme_moves_a_state_dict(tmp_path):
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (program,) = programs
    (tmp_path / "move.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "move.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"e1.s0 {'weight': \[\[.*\]\], 'bias': \[.*\]}", done.stdout)
    assert "payload_bytes=40" in done.stdout
    assert list(tmp_path.glob("weights/*/e1.s0*/READY"))
