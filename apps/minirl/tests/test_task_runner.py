"""The end of a run, with nothing started in it."""

import contextlib
import io
import os
import signal
from types import SimpleNamespace

import pytest

from minirl import task_runner
from minirl.config import load_config
from minirl.interruption import interrupting
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


def test_signals_are_ignored_until_the_temporary_files_are_gone(monkeypatch, tmp_path):
    removed = []

    @contextlib.contextmanager
    def directory(_):
        yield tmp_path
        os.kill(os.getpid(), signal.SIGTERM)
        removed.append(tmp_path)

    def nothing(*_):
        return None

    data = SimpleNamespace(scorer=SimpleNamespace(close=nothing))
    replaced = {
        "make_plan": lambda _: SimpleNamespace(device="cpu", slots=1, model_path=tmp_path),
        "check_cluster": nothing,
        "_recorded": nothing,
        "load_task_data": lambda *_: data,
        "session_directory": directory,
        "redirected_output": lambda _: contextlib.nullcontext(io.StringIO()),
        "become_subreaper": nothing,
        "end_descendants": nothing,
        "attach": nothing,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(task_runner, name, value)
    monkeypatch.setattr(TaskRunner, "_run", nothing)
    config = load_config([f"trainer.run_dir={tmp_path / 'run'}", "trainer.report_to=[]"])
    with interrupting():
        assert TaskRunner(config).run() == 0
    assert removed == [tmp_path]
