"""The end of a run, with nothing started in it."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from minirl import ray_cluster, task_runner
from minirl.bounded import Ending
from minirl.business_log import our_loggers
from minirl.config import load_config
from minirl.interruption import interrupting
from minirl.output_redirection import where_traced
from minirl.task_runner import TaskRunner


@pytest.mark.parametrize(
    ("lr", "embedded", "told"), [(1.1e-4, False, 1), (1e-4, False, 0), (1.5e-3, True, 0)]
)
def test_a_learning_rate_for_another_kind_of_model_is_warned_about(monkeypatch, lr, embedded, told):
    warnings = []
    monkeypatch.setattr(task_runner._logger, "warning", lambda *parts: warnings.append(parts))
    config = load_config([f"actor.optimizer_config.lr={lr}", "cluster.device=cpu"])
    task_runner._warn(SimpleNamespace(config=config, embedded_model=embedded, model_path="m"))
    assert len(warnings) == told


@pytest.fixture
def nothing_started(monkeypatch, tmp_path):
    """Makes a runner that starts nothing: `run(self, output, parts)` is what it does instead."""

    def nothing(*_):
        return None

    data = SimpleNamespace(scorer=SimpleNamespace(close=nothing))
    plan = SimpleNamespace(device="cpu", slots=1, model_path=tmp_path)
    replaced = {
        "make_plan": lambda _: plan,
        "check_cluster": nothing,
        "_recorded": nothing,
        "load_task_data": lambda *_: data,
        "session_directory": lambda _: contextlib.nullcontext(tmp_path),
        "become_subreaper": nothing,
        "end_descendants": nothing,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(task_runner, name, value)
    for logger in our_loggers():
        monkeypatch.setattr(logger, "handlers", [])

    def runner(run):
        # What redirected_output redirects; pytest's own streams write elsewhere.
        for number, name in ((1, "stdout"), (2, "stderr")):
            stream = os.fdopen(number, "w", buffering=1, closefd=False)
            monkeypatch.setattr(sys, name, stream)
        monkeypatch.setattr(TaskRunner, "_run", run)
        config = load_config([f"trainer.run_dir={tmp_path / 'run'}", "trainer.report_to=[]"])
        return TaskRunner(config)

    return runner


def test_signals_are_ignored_until_the_temporary_files_are_gone(
    monkeypatch, tmp_path, nothing_started
):
    removed = []

    @contextlib.contextmanager
    def directory(_):
        yield tmp_path
        os.kill(os.getpid(), signal.SIGTERM)
        removed.append(tmp_path)

    monkeypatch.setattr(task_runner, "session_directory", directory)
    with interrupting():
        assert nothing_started(lambda *_: None).run() == 0
    assert removed == [tmp_path]


def test_a_library_that_exits_is_a_failure_with_a_cause(nothing_started, tmp_path, capfd):
    def leave(*_):
        sys.exit(15)

    assert nothing_started(leave).run() == 1
    assert "[MiniRL] Run failed: SystemExit: 15\n" in capfd.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "SystemExit: 15" in (tmp_path / "run" / "logs" / "driver.log").read_text()


@pytest.mark.parametrize("fails", [True, False])
def test_a_full_disk_ends_a_run_with_its_cause(nothing_started, tmp_path, capfd, fails):
    """Where it is full from the middle of the run on, and where only its end has no room."""
    full = Path("/dev/full")
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "driver.log").symlink_to(full)

    def run(_, output, __):
        (output.path / "summary.json.tmp").symlink_to(full)
        (output.path / "reward.png").symlink_to(full)
        output.rewards.append(0.5)
        if fails:
            descriptor = os.open(full, os.O_WRONLY)
            os.dup2(descriptor, output._metrics.fileno())
            os.close(descriptor)
            output.write_metrics(1, {"reward/mean": 0.5})

    assert nothing_started(run).run() == 1
    said = capfd.readouterr().err
    reason = "[Errno 28] No space left on device"
    expected = [
        f"Run failed: OSError: {reason}",
        f"The trace is not written: {reason}",
        f"The summary is not written: {reason}",
        f"The reward curve is not written: {reason}",
        f"Run finished: status=failed, run_dir={tmp_path / 'run'}",
        f"The end of {tmp_path / 'run' / 'metrics.jsonl'} is not written: {reason}",
    ]
    if not fails:
        expected = expected[2:5]
    assert said.splitlines() == [f"[MiniRL] {line}" for line in expected]


def test_an_error_beside_the_run_leaves_its_trace_in_the_log(
    monkeypatch, nothing_started, tmp_path
):
    def output(*_):
        raise RuntimeError("a line\nand another")

    monkeypatch.setattr(task_runner, "RunOutput", output)
    with pytest.raises(RuntimeError) as caught:
        nothing_started(lambda *_: None).run()
    log = tmp_path / "run" / "logs" / "driver.log"
    assert "Traceback" in log.read_text()
    assert where_traced(caught.value) == f"the trace is in {log}"


def test_the_stages_of_an_end_share_its_time(monkeypatch, nothing_started):
    """All of them hang."""
    hang = threading.Event()
    seen = []

    def run(self, _, parts):
        self._end = Ending(1.0)
        self._trainer = SimpleNamespace(settle=lambda _: hang.wait(60), evaluations=[])
        self._system = SimpleNamespace(shutdown=lambda: hang.wait(60))
        parts.callback(ray_cluster.leave, self._end)
        parts.callback(self._stop)

    monkeypatch.setattr(task_runner, "is_running", lambda _: True)
    monkeypatch.setattr(task_runner, "end_descendants", lambda end: seen.append(end.at_most(3)))
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: hang.wait(60))
    began = time.monotonic()
    assert nothing_started(run).run() == 0
    hang.set()
    assert time.monotonic() - began < 4
    assert seen == [0.0]
