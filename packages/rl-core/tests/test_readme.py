"""What the README shows runs, and says what it prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(*command, **options):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_program_runs():
    program = BLOCKS[0]
    assert 15 <= len([line for line in program.splitlines() if line.strip()]) <= 20
    assert re.fullmatch(
        r"e1\.s7 True \['flush_kv', 'open_gate'\] xxh3-128:[0-9a-f]{32}\n",
        run(sys.executable, "-c", program),
    )


def test_the_contract_example_holds(pytester):
    pytester.makepyfile(test_example=BLOCKS[1])
    chosen = "twice or stamped or fence_refuses or cold"
    pytester.runpytest_inprocess("-k", chosen).assert_outcomes(passed=3, skipped=1)


def test_every_python_block_is_run_here():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("command", re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
def test_commands(command):
    if command.startswith("pip install"):
        extras = set(re.findall(r"rl-core\[(\w+)\]", command))
        assert extras == {"torch", "testing"}
        return
    arguments = command.replace("python -m timeit", "python -m timeit -n 1 -r 1")
    path = f"{Path(sys.executable).parent}"
    assert "loop" in run("bash", "-c", arguments, env={"PATH": f"{path}:/usr/bin:/bin"})


def test_every_module_is_in_the_table():
    import rl_core

    here = Path(rl_core.__file__).parent
    modules = {path.stem for path in here.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in here.glob("*/__init__.py")}
    table = README.split("## Modules")[1].split("## The contract kit")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named | {"testing"} == modules
