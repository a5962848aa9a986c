import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_ckpt_mooncake.transfer import Listening, Transfer
from rl_core.testing.process_holdings import held
from rl_core.testing.readme_program import run_program

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.engine
def test_program_of_the_readme_moves_a_state_dict(tmp_path):
    printed = run_program(README, tmp_path)
    assert re.search(r"e1.s0 {'weight': \[\[.*\]\], 'bias': \[.*\]}", printed)
    assert "payload_bytes=40" in printed


NARROWED = """
from rl_ckpt_mooncake.transfer import Listening, Transfer
transfer = Transfer(Listening("127.0.0.1", "tcp"))
print(transfer.session)
"""


@pytest.mark.engine
def test_ports_are_in_the_range_that_the_readme_names():
    assert "between 15000 and 17000" in README.read_text()
    before = set(held().listening)
    transfer = Transfer(Listening("127.0.0.1", "tcp"))
    doors = set(held().listening) - before
    transfer.close()
    assert len(doors) == 2
    for door in doors:
        host, _, port = door.rpartition(":")
        assert host == "*"
        assert 15000 <= int(port) <= 17000


@pytest.mark.engine
def test_range_can_be_narrowed_as_the_readme_says():
    names = re.findall(r"`(MC_M[A-Z_]+_PORT)`", README.read_text())
    limits = dict(zip(names, ("21300", "21400"), strict=True))
    done = subprocess.run(
        [sys.executable, "-c", NARROWED],
        env={**os.environ, **limits},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert 21300 <= int(done.stdout.rpartition(":")[2]) <= 21400
