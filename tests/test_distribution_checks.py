"""The checks of `tools/check_distributions.py` bite; that the packages pass them is its own job."""

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
sys.path.insert(0, str(TOOLS))

from check_distributions import Results
from distributions import Distribution, DistributionError, check_pin, check_sdist, check_wheel

INFO = "rl_ckpt_made-0.1.0.dist-info"
README = "# rl-ckpt-made\n"
PROJECT = '[project]\nname = "rl-ckpt-made"\nversion = "0.1.0"\n'
METADATA = f"""\
Metadata-Version: 2.4
Name: rl-ckpt-made
Version: 0.1.0
License-Expression: Apache-2.0
Requires-Dist: rl-core[torch]<0.2,>=0.1

{README}"""
WHEEL = {
    "rl_ckpt_made/__init__.py": "",
    "rl_ckpt_made/py.typed": "",
    f"{INFO}/METADATA": METADATA,
    f"{INFO}/licenses/LICENSE": "",
}
SDIST = {
    "README.md": README,
    "CHANGELOG.md": "",
    "LICENSE": "",
    "pyproject.toml": PROJECT,
    "src/rl_ckpt_made/__init__.py": "",
    "tests/test_contract.py": "",
}


def write_sdist(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"rl_ckpt_made-0.1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture
def made(tmp_path):
    """A function from the files of a wheel and an sdist to a distribution."""
    for name, text in SDIST.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    item = Distribution(
        "rl-ckpt-made",
        tmp_path / "source",
        tmp_path / "rl_ckpt_made-0.1.0-py3-none-any.whl",
        tmp_path / "rl_ckpt_made-0.1.0.tar.gz",
    )

    def make(wheel, sdist=SDIST):
        with zipfile.ZipFile(item.wheel, "w") as archive:
            for name, text in wheel.items():
                archive.writestr(name, text)
        write_sdist(item.sdist, sdist)
        return item

    return make


def without(files, name):
    return {key: text for key, text in files.items() if key != name}


def test_a_good_distribution_passes(made):
    item = made(WHEEL)
    check_wheel(item, "0.1.0")
    check_sdist(item)
    assert item.requirement("cpu").startswith("rl-ckpt-made[cpu] @ file://")


@pytest.mark.parametrize(
    "wheel",
    [
        without(WHEEL, "rl_ckpt_made/py.typed"),
        without(WHEEL, "rl_ckpt_made/__init__.py"),
        without(WHEEL, f"{INFO}/licenses/LICENSE"),
        {**WHEEL, "tests/test_contract.py": ""},
        {**WHEEL, f"{INFO}/METADATA": METADATA.replace("0.1.0", "0.2.0")},
        {**WHEEL, f"{INFO}/METADATA": METADATA.replace("Apache-2.0", "MIT")},
        {**WHEEL, f"{INFO}/METADATA": METADATA.replace("<0.2,", "")},
        {**WHEEL, f"{INFO}/METADATA": METADATA + "more"},
    ],
    ids=["py.typed", "module", "licence", "tests", "version", "licence name", "pin", "readme"],
)
def test_a_bad_wheel_does_not(made, wheel):
    with pytest.raises(DistributionError):
        check_wheel(made(wheel), "0.1.0")


@pytest.mark.parametrize("name", SDIST)
def test_a_bad_sdist_does_not(made, name):
    with pytest.raises(DistributionError, match=Path(name).name):
        check_sdist(made(WHEEL, without(SDIST, name)))


@pytest.mark.parametrize(
    ("requirement", "good"),
    [
        ("rl-core<0.5,>=0.4", True),
        ("rl-core[torch] (>=0.4,<0.5)", True),
        ("rl-ckpt-made[cpu]; extra == 'all'", True),
        ("rlax>=1", True),
        ("rl-core", False),
        ("rl-core>=0.4", False),
        ("rl-core<0.6,>=0.5", False),
        ("rl-core<0.5,>=0.4.1", False),
        ("rl-ckpt-disk<0.5,>=0.4", False),
    ],
)
def test_pins_of_the_core(requirement, good):
    if good:
        check_pin("rl-ckpt-made", requirement, "0.4.2")
        return
    with pytest.raises(DistributionError):
        check_pin("rl-ckpt-made", requirement, "0.4.2")


def fail():
    raise DistributionError("it is\nbad")


def test_the_table_says_what_held(capsys):
    results = Results()
    results.record("rl-core", "build", lambda: None)
    assert not results.failed
    results.record("rl-core", "wheel", fail)
    results.record("rl-ckpt-disk", "build", lambda: "3 passed")
    assert results.failed
    assert results.table(["rl-core", "rl-ckpt-disk"], ("build", "wheel")).splitlines() == [
        "              build         wheel",
        "rl-core       ok            FAILED",
        "rl-ckpt-disk  ok, 3 passed  -",
    ]
    assert results.failures() == "FAILED rl-core wheel: bad\n"
    assert "it is\nbad" in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["test_packages.py", "check_distributions.py"])
def test_the_workflow_runs_the_tools_as_a_matrix(tool):
    """Each tool lists what the matrix of its job is made of."""
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert f"python3 tools/{tool} --list" in workflow
    assert f"python3 tools/{tool} ${{{{ matrix.package }}}}" in workflow
    command = [sys.executable, TOOLS / tool, "--list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    members = [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")]
    assert len(set(json.loads(done.stdout)) - {"together"}) == len(members)


def test_an_unknown_name_is_refused():
    command = [sys.executable, TOOLS / "check_distributions.py", "rl-cor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "unknown: rl-cor; known: rl-ckpt-disk" in done.stderr
