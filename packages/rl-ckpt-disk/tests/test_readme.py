"""The program in the README runs."""

import re
from pathlib import Path

from rl_core.testing.readme_program import run_program

README = Path(__file__).parents[1] / "README.md"


def test_the_program_in_the_readme_moves_a_state_dict(tmp_path):
    printed = run_program(README, tmp_path)
    assert re.search(r"e1.s0 {'weight': \[\[.*\]\], 'bias': \[.*\]}", printed)
    assert "payload_bytes=40" in printed
    assert list(tmp_path.glob("weights/*/e1.s0*/READY"))
