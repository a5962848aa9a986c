"""What an owner of other hardware is asked to run, on the CPU and without engines."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEFORE_RUNS = ["packages", "doctor", "torch"]


def smoke(directory, *arguments):
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "npu_smoke.sh"), *arguments],
        cwd=directory,
        env={**os.environ, "PATH": places, "SMOKE_ENGINES": " "},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    packed = list(directory.glob("npu_smoke_*.tar.gz"))
    return done, packed


def test_every_step_is_written_down_and_packed(tmp_path):
    done, [packed] = smoke(tmp_path, "MODEL", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(packed) as archive:
        names = {Path(name).name for name in archive.getnames()}
        [listed] = [name for name in archive.getnames() if name.endswith("packages.log")]
        assert b"\nrl-core==" in archive.extractfile(listed).read()
    assert names >= {"steps.txt", *(f"{step}.log" for step in BEFORE_RUNS)}
    assert done.stdout.splitlines()[:-1] == [f"{step}: exit code 0" for step in BEFORE_RUNS]


def test_a_step_that_fails_does_not_stop_the_next(tmp_path):
    done, [_] = smoke(tmp_path, "MODEL", "npu")
    assert done.returncode == 1
    codes = dict(line.split(": exit code ") for line in done.stdout.splitlines()[:-1])
    assert list(codes) == ["npu_smi", *BEFORE_RUNS]
    assert codes["npu_smi"] != "0"
    assert codes["torch"] != "0"
    assert codes["doctor"] == "0"


def test_without_a_model_it_says_what_it_needs(tmp_path):
    done, packed = smoke(tmp_path)
    assert (done.returncode, packed) == (1, [])
    assert "usage: npu_smoke.sh MODEL" in done.stderr
