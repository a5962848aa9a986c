import re
from pathlib import Path

import pytest

from rl_core.testing.readme_program import run_program

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.engine
def test_program_of_the_readme_moves_a_state_dict(tmp_path):
    printed = run_program(README, tmp_path)
    assert re.search(r"e1.s0 {'weight': \[\[.*\]\], 'bias': \[.*\]}", printed)
    assert "payload_bytes=40" in printed
