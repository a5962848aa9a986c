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
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "weight (2, 4)" in done.stdout
    assert "payload_bytes=40" in done.stdout


PORTS = """
from rl_ckpt_mooncake.transfer import Listening, Transfer
from rl_core.testing.process_holdings import held
transfer = Transfer(Listening("127.0.0.1", "tcp"))
print(*held().listening)
"""


@pytest.mark.engine
@pytest.mark.parametrize(("low", "high"), [(None, None), (21300, 21400)])
def test_ports_to_firewall_are_in_the_range_that_the_readme_names(monkeypatch, low, high):
    for name, value in (("MC_MIN_PRC_PORT", low), ("MC_MAX_PRC_PORT", high)):
        assert name in README.read_text()
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, str(value))
    done = subprocess.run(
        [sys.executable, "-c", PORTS], capture_output=True, text=True, timeout=120, check=True
    )
    doors = done.stdout.split()
    assert len(doors) == 2
    for door in doors:
        host, _, port = door.rpartition(":")
        assert host == "*"
        assert (low or 15000) <= int(port) <= (high or 17000)
