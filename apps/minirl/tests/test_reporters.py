"""`trainer.report_to`: what each gets, and one that fails does not end a run."""

import importlib
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from minirl.reporters import GROUP, Reporters, check_reporters
from rl_core.errors import ComponentLoadError, ComponentNotFoundError, ConfigError

MADE = []


class Listing:
    def __init__(self, run_dir, config):
        self.given, self.reported, self.closed = (run_dir, config), [], False
        MADE.append(self)

    def report(self, step, metrics):
        if metrics.get("loss") == 13:
            raise ConnectionError("nobody there\n(at all)")
        self.reported.append((step, metrics))

    def close(self):
        self.closed = True


@pytest.fixture(autouse=True)
def provider(tmp_path, monkeypatch):
    """A distribution that provides two reporters by entry point."""
    info = tmp_path / "lister-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lister\nVersion: 1\n")
    here = f"{__name__}:Listing"
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nlister = {here}\nbroken = no_such:Thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Listing=Listing))
    importlib.invalidate_caches()
    MADE.clear()


def test_an_entry_point_gets_finite_numbers(tmp_path):
    reporters = Reporters(["lister"], tmp_path, {"trainer": {"seed": 1}})
    reporters.report(3, {"loss": 0.5, "policy_version": "e1.s2", "kl": float("nan"), "n": 2})
    reporters.close()
    assert MADE[0].given == (tmp_path, {"trainer": {"seed": 1}})
    assert MADE[0].reported == [(3, {"loss": 0.5, "n": 2.0})]
    assert MADE[0].closed


def test_one_that_fails_is_left_out_and_the_others_go_on(tmp_path, caplog):
    reporters = Reporters(["lister", "tensorboard"], tmp_path, {})
    for step, loss in enumerate([1.0, 13.0, 2.0], start=1):
        reporters.report(step, {"loss": loss})
    reporters.close()
    assert [step for step, _ in MADE[0].reported] == [1]
    assert "lister gets nothing any more: ConnectionError: nobody there" in caplog.text
    (events,) = tmp_path.glob("events.out.tfevents*")
    loaded = [event for event in EventFileLoader(str(events)).Load() if event.summary.value]
    assert [event.step for event in loaded] == [1, 2, 3]


def test_what_cannot_be_used_is_said_before_a_run(monkeypatch):
    check_reporters(["tensorboard", "lister"])
    check_reporters([])
    with pytest.raises(ConfigError, match=r"report_to=tensorbord: must be .*lister.*tensorboard$"):
        check_reporters(["tensorbord"])
    with pytest.raises(ComponentLoadError, match=r"broken \(no_such:Thing\) cannot be loaded"):
        check_reporters(["broken"])
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ComponentNotFoundError, match=r"pip install 'rl-minirl\[wandb\]'"):
        check_reporters(["wandb"])
