"""Whole runs of the app, as a user starts them: a subprocess, its log, and what it left behind."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from readmes import program
from shared_memory import orphaned_segments, pids
from witnesses import ABORT, ONE_AT_FIRST

from minirl.tiny_model import build_tiny_model

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
    temporary: Path = Path()
    begun: float = math.inf
    ended: float = math.inf

    def start(self) -> "Run":
        if self.run_dir == Path():
            self.run_dir = self.path / "run"
        self.path.mkdir(parents=True, exist_ok=True)
        # A short name: the sockets below it may have 107 bytes.
        self.temporary = Path(tempfile.mkdtemp(prefix="mr-"))
        self.begun = time.time()
        command = [sys.executable, str(self.program), *self.arguments]
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"trainer.run_dir={self.run_dir}"],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.path,
                # Two runs share two cores here: threads that spin while they wait would take turns.
                env={**os.environ, "OMP_WAIT_POLICY": "passive", MARK: self.mark, **self._places()},
                text=True,
                start_new_session=True,
            )
        self._begin = time.monotonic()
        return self

    def _places(self) -> dict[str, str]:
        """A directory for what is temporary; compiled kernels stay where all runs find them."""
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/tmp/minirl-test-kernels")
        return {"TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": cache}

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
        self.wait_until(lambda: text in self.log, text, timeout)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float) -> None:
        """Block until the run has come so far."""
        end = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"ended before {what!r}:\n{self.log}"
            assert time.monotonic() < end, f"no {what!r} within {timeout} s:\n{self.log}"
            time.sleep(0.1)

    def finish(self, timeout: float) -> "Run":
        try:
            self.code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            pytest.fail(f"still running after {timeout} s:\n{self.log}")
        self.seconds = time.monotonic() - self._begin
        self.ended = time.time()
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
        shutil.rmtree(self.temporary, ignore_errors=True)

    def tells_in_order(self, beginnings: Sequence[str]) -> None:
        """Fail unless the log has lines that begin so, in that order; others may lie between."""
        lines = iter(self.lines)
        for expected in beginnings:
            assert any(line.startswith(f"[MiniRL] {expected}") for line in lines), expected

    def left(self) -> list[str]:
        """What outlived the run: processes (and their ports), temporary files, shared memory."""
        processes = [f"process {pid}" for pid in self.processes()]
        files = [str(path) for path in self.temporary.iterdir()]
        return [*processes, *files, *orphaned_segments(self.begun)]

    def processes(self) -> list[int]:
        """Living processes of this run, found by their environment."""
        return marked_processes(self.mark)

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


def marked_processes(mark: str) -> list[int]:
    """Living processes with this mark in their environment."""
    needle = f"{MARK}={mark}".encode()
    return [pid for pid in pids() if needle in _environment(pid)]


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


ONE_ACTOR = ("cluster.actor.n_gpus_per_node=1", "actor.engine_config.fsdp_size=1")

ENDED_S = 30.0
"""Within which a run has to end once a member has died."""

VERIFIED = (
    "checkpoint_engine.debug.verify_light_transfer=true",
    "checkpoint_engine.debug.verify_live_weights=true",
    "checkpoint_engine.debug.strict=true",
)
PERTURBED = "checkpoint_engine.debug.perturb_before_sync=true"
THREE_STEPS = (
    "trainer.total_training_steps=3",
    "data.eval_size=0",
    "rollout.max_completion_length=16",
)
TWO_RANKS = "rollout.tensor_model_parallel_size=2"

TWO_REPLICAS = (
    ONE_AT_FIRST,
    "cluster.rollout.n_gpus_per_node=2",
    "checkpoint_engine.debug.verify_replicas=all",
)

WITNESSED = {
    "hccl": (
        "tied",
        ("config=separate", "checkpoint_engine.backend=hccl", *VERIFIED, *TWO_REPLICAS),
    ),
    "mooncake": (
        "moe",
        ("config=separate", "checkpoint_engine.backend=mooncake", *VERIFIED, TWO_RANKS),
    ),
    "disk": (
        "dense",
        ("config=separate", "checkpoint_engine.backend=disk", *VERIFIED, TWO_RANKS, ABORT),
    ),
    "fused": (
        "tied",
        (TWO_RANKS, "rollout.temperature=0.7", "trainer.seed=2", *VERIFIED, PERTURBED),
    ),
    "sglang": (
        "moe",
        ("rollout.name=sglang", TWO_RANKS, "rollout.temperature=0.7", *VERIFIED),
    ),
}
"""Runs whose engine is asked in the end what it serves: kind of model and arguments.

Where one replica is enough at first, the other comes late, and the task is the README's own, in
one file.
"""

ON_TWO_NODES = ("hccl", "mooncake")
"""Those that join two Ray nodes, whose workers do not carry the mark of the run; the others start a
Ray of their own."""


class WitnessedRuns:
    """Each run of `WITNESSED`, made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._runner = Runner(root)
        self._runs: dict[str, Run] = {}
        self._nodes = contextlib.ExitStack()
        self._address: str | None = None

    def __getitem__(self, name: str) -> Run:
        if name not in self._runs:
            kind, arguments = WITNESSED[name]
            model = self._root / f"model-{name}"
            build_tiny_model(model, kind=kind, seed=3)
            if name in ON_TWO_NODES:
                arguments = (*arguments, f"cluster.ray_address={self._two_nodes()}")
            if ONE_AT_FIRST in arguments:
                (self._root / "task.py").write_text(program("task.py"))
                arguments = (*arguments, f"data.task={self._root / 'task.py'}")
            self._runs[name] = self._complete(model, *arguments)
        return self._runs[name]

    def _complete(self, model: Path, *arguments: str) -> Run:
        return self._runner.complete(
            f"actor.model_config.local_path={model}",
            f"checkpoint_engine.root_dir={self._root / 'exchange'}",
            *THREE_STEPS,
            *arguments,
            program=Path(__file__).parent / "witnessed_run.py",
        )

    def _two_nodes(self) -> str:
        """Address of a cluster of two nodes, which one run after the other joins."""
        if self._address is None:
            program = Path(__file__).parent / "two_nodes.py"
            process = subprocess.Popen(
                [sys.executable, str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._nodes.enter_context(process)
            self._nodes.callback(process.kill)  # in the end, if it does not end by itself
            self._nodes.callback(process.wait, 30)
            self._nodes.callback(process.stdin.close)
            self._address = process.stdout.readline().strip()
        return self._address

    def close(self) -> None:
        self._runner.close()
        self._nodes.close()
