"""Whole runs of the app, as a user starts them: a subprocess, its log, and what it left behind."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
APP = ROOT / "apps" / "minirl"
MARK = "MINIRL_TEST_RUN"


@dataclass
class Run:
    """A run of `minirl` in a process of its own, recognisable by a mark in its environment."""

    path: Path
    arguments: tuple[str, ...]
    program: Path = APP
    run_dir: Path = Path()
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[str] | None = None
    code: int | None = None
    seconds: float = 0.0

    def start(self) -> "Run":
        if self.run_dir == Path():
            self.run_dir = self.path / "run"
        self.path.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(self.program), *self.arguments]
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"trainer.run_dir={self.run_dir}"],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.path,
                env={**os.environ, MARK: self.mark},
                text=True,
                start_new_session=True,
            )
        self._begin = time.monotonic()
        return self

    @property
    def log_path(self) -> Path:
        return self.path / "log"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def lines(self) -> list[str]:
        return self.log.splitlines()

    def wait_for(self, text: str, timeout: float) -> None:
        """Block until `text` is in the log."""
        end = time.monotonic() + timeout
        while text not in self.log:
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.log}"
            assert time.monotonic() < end, f"no {text!r} within {timeout} s:\n{self.log}"
            time.sleep(0.1)

    def finish(self, timeout: float) -> "Run":
        try:
            self.code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            pytest.fail(f"still running after {timeout} s:\n{self.log}")
        self.seconds = time.monotonic() - self._begin
        return self

    def stop(self) -> None:
        """End everything that carries the mark."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with_deadline = time.monotonic() + 40
            while self.process.poll() is None and time.monotonic() < with_deadline:
                time.sleep(0.1)
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Living processes of this run, found by their environment."""
        needle = f"{MARK}={self.mark}".encode()
        return [pid for pid in _pids() if needle in _environment(pid)]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return _read_jsonl(self.run_dir / "metrics.jsonl")

    @property
    def trajectories(self) -> list[dict[str, Any]]:
        return _read_jsonl(self.run_dir / "trajectories.jsonl")


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> bytes:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        if "State:\tZ" in status:
            return b""
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


class Runner:
    """Starts runs and makes sure that none outlives the test."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._runs: list[Run] = []

    def start(self, *arguments: str, program: Path = APP, run_dir: Path | None = None) -> Run:
        run = Run(self._root / f"run{len(self._runs)}", arguments, program, run_dir or Path())
        self._runs.append(run)
        return run.start()

    def complete(self, *arguments: str, timeout: float = 400, **options: Path | None) -> Run:
        return self.start(*arguments, **options).finish(timeout)

    def close(self) -> None:
        for run in self._runs:
            run.stop()


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    made = Runner(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`minirl` without any argument, from start to end."""
    made = Runner(tmp_path_factory.mktemp("default"))
    yield made.complete()
    made.close()
