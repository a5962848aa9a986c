"""Runs that were killed: what is resumed, what is refused, what becomes of the rows."""

import dataclasses
import json
import os
import random
import shutil
import signal
import traceback
from types import SimpleNamespace

import msgspec
import pytest
from mortal_loop import STEPS, Fate, configured, run

from minirl.checkpoints import Checkpoints
from minirl.config import load_config
from minirl.prompt_file import RawPrompt
from minirl.prompt_loader import PromptLoader
from minirl.prompts import load_prompts
from minirl.resume import find_resumption
from minirl.resume_settings import model_digest, reference_digest, shared_settings
from minirl.reward_mix import Score
from minirl.run_files import RunFiles, latest_run
from minirl.run_output import RunOutput, run_lock
from minirl.run_state import RunState, read_state
from minirl.tiny_model import ensure_tiny_model
from minirl.workers import ActorWorker
from rl_core.errors import ConfigError, TransferTimeoutError

MODEL = ensure_tiny_model()
MOMENTS = 6
"""Moments at which a run is killed, at random."""


class PlainTokenizer:
    chat_template = None
    unk_token_id = None

    def __call__(self, texts, **_options):
        return {"input_ids": [list(text.encode()) for text in texts]}


def make_data(config):
    prompts, held_out = load_prompts(config.data, PlainTokenizer(), config.trainer.seed)

    def score(prompts, texts, ids, first):
        return [Score(float(sum(one)), {}) for one in ids]

    return SimpleNamespace(
        loader=PromptLoader(
            prompts, config.data.train_batch_size, shuffle=True, seed=config.trainer.seed
        ),
        held_out=held_out[:2],
        decode=lambda sequences: [str(sequence) for sequence in sequences],
        scorer=SimpleNamespace(score=score),
        model_path=MODEL,
    )


def live(run_dir, moments=None, **changes):
    """A run in a process of its own; whether it lived to its end."""
    config = configured(run_dir, **changes)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run(config, make_data(config), MODEL, Fate(moments))
            code = 0
        except BaseException:  # noqa: BLE001  (for the report of the test)
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code == 0


def rows(run_dir, name):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def told(run_dir):
    """What a run says of its samples and weights, apart from times and epochs."""
    samples = rows(run_dir, "trajectories.jsonl")
    for sample in samples:
        sample["policy_version_spans"] = [
            [version.partition(".")[2], start, end]
            for version, start, end in sample["policy_version_spans"]
        ]
    metrics = rows(run_dir, "metrics.jsonl")
    losses = [(line["step"], line["loss"], line["reward/mean"]) for line in metrics]
    return samples, losses, json.loads((run_dir / "checkpoints" / "final.json").read_text())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert live(run_dir)
    samples, losses, final = told(run_dir)
    assert [sample["index"] for sample in samples] == list(range(12 * STEPS))
    assert [step for step, _, _ in losses] == list(range(1, STEPS + 1))
    return samples, losses, final


@pytest.mark.parametrize("seed", range(MOMENTS))
def test_a_run_killed_anywhere_ends_as_one_that_was_not(uninterrupted, tmp_path, seed):
    """Killed and resumed until it lives: in the middle of rows, of a checkpoint, of a step."""
    run_dir, drawn = tmp_path / "run", random.Random(seed)
    lives = 1
    while not live(
        run_dir, drawn.randint(10, 90) if lives < 4 else None, **{"trainer.resume": "auto"}
    ):
        lives += 1
    assert told(run_dir) == uninterrupted
    versions = [
        sample["policy_version_spans"][0][0] for sample in rows(run_dir, "trajectories.jsonl")
    ]
    assert versions == sorted(versions)
    whole = [path.name for path in sorted((run_dir / "checkpoints").glob("*step*"))]
    assert whole == ["step_000004", "step_000006"]


def test_what_was_done_after_the_checkpoint_is_set_aside(tmp_path):
    run_dir = tmp_path / "run"
    assert live(run_dir)
    first = rows(run_dir, "trajectories.jsonl")
    older = run_dir / "checkpoints" / "step_000004"
    (run_dir / "summary.json").write_text('{"status": "failed"}')
    assert live(run_dir, **{"trainer.resume": older})
    aside = run_dir / "abandoned" / "e2"
    assert rows(aside, "trajectories.jsonl") == first[48:]
    # It would tell of a run that goes on what became of it before.
    assert RunFiles(run_dir).summary() is None
    assert rows(aside, "summary.json") == [{"status": "failed"}]
    assert [line["step"] for line in rows(aside, "metrics.jsonl")] == [5, 6]
    assert read_state(aside / "step_000006").version == "e1.s6"
    assert read_state(run_dir / "checkpoints" / "step_000006").version == "e2.s6"
    again = rows(run_dir, "trajectories.jsonl")
    assert again[:48] == first[:48]
    assert again[48]["policy_version_spans"] == [["e2.s4", 0, 4]]


def test_tensorboard_shows_what_came_of_the_run_only(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = configured(tmp_path, **{"trainer.report_to": "[tensorboard]"})
    for done, steps in ((0, range(1, 7)), (4, range(5, 8))):
        with RunOutput(tmp_path, config, RunState(step=done, version=f"e1.s{done}")) as output:
            for step in steps:
                output.write_metrics(step, {"loss": done + step, "reward/mean": 0.0})
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [
        *[(step, step) for step in range(1, 5)],
        *[(step, 4 + step) for step in range(5, 8)],
    ]


def test_the_number_of_steps_may_grow(tmp_path):
    run_dir = tmp_path / "run"
    assert live(run_dir, **{"trainer.total_training_steps": 2})
    assert live(run_dir, **{"trainer.total_training_steps": 3, "trainer.resume": run_dir})
    assert [line["step"] for line in rows(run_dir, "metrics.jsonl")] == [1, 2, 3]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    assert live(run_dir)
    return run_dir


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def found(run_dir, **changes):
    config = configured(run_dir, **{"trainer.resume": "auto", **changes})
    resumption = find_resumption(config)
    resumption.check(config, MODEL)
    return resumption


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.seed", 2),
        ("data.task", "sum"),
        ("data.train_batch_size", 6),
        ("data.shuffle", "false"),
        ("algorithm.clip_ratio", 0.3),
        ("actor.optimizer_config.lr", 0.1),
        ("rollout.temperature", 0.5),
    ],
)
def test_settings_that_contradict_the_checkpoint_are_refused(finished, key, value):
    with pytest.raises(ConfigError, match=rf"^{key}=.*step_000006 was written with {key}="):
        found(finished, **{key: value})


def test_fewer_steps_than_done_are_refused(finished):
    with pytest.raises(ConfigError, match=r"trainer.total_training_steps=5: .*6 steps behind it"):
        found(finished, **{"trainer.total_training_steps": 5})


def test_another_model_is_refused(finished, tmp_path):
    model = shutil.copytree(MODEL, tmp_path / "model")
    config = configured(finished, **{"trainer.resume": "auto"})
    resumption = find_resumption(config)
    resumption.check(config, model)
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    with pytest.raises(ConfigError, match=r"local_path=.* is of another model"):
        resumption.check(config, model)


def test_a_reference_of_other_weights_is_refused(finished, tmp_path):
    """The policy's own come from the checkpoint; the reference's come from the model."""
    model = shutil.copytree(MODEL, tmp_path / "model")
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(file.seek(0, os.SEEK_END) // 2)
        file.write(bytes(64))
    found = find_resumption(configured(finished, **{"trainer.resume": "auto"}))
    for kl_coef in (0.0, 0.1):
        config = configured(finished, **{"algorithm.kl_coef": kl_coef})
        digests = [reference_digest(config, path) for path in (MODEL, model)]
        assert (digests[0] == digests[1] == "") is (kl_coef == 0)
        saved = {"settings": shared_settings(config), "reference_digest": digests[0]}
        state = msgspec.structs.replace(found.state, **saved)
        resumption = dataclasses.replace(found, state=state)
        resumption.check(config, MODEL)
        if kl_coef == 0:
            resumption.check(config, model)
            continue
        with pytest.raises(ConfigError, match=r"local_path=.*model: .*reference .* other weights"):
            resumption.check(config, model)


def test_other_prompts_are_refused(finished):
    config = configured(finished)
    state = find_resumption(configured(finished, **{"trainer.resume": "auto"})).state
    loader = make_data(config).loader
    loader.load_state(state.data)
    loader._prompts._raw[3] = RawPrompt.of_text(3, "say something else:", "3")
    del loader._prompts.digest
    with pytest.raises(ConfigError, match="digest"):
        loader.load_state(state.data)


@pytest.mark.parametrize("how", ["staged", "no record", "cut short", "lacks a file", "not JSON"])
def test_a_checkpoint_that_is_not_whole_is_skipped(copied, how):
    checkpoints = copied / "checkpoints"
    newest = checkpoints / "step_000006"
    match how:
        case "staged":
            newest = newest.rename(checkpoints / ".step_000006.staged")
        case "no record":
            (newest / "run.json").unlink()
        case "cut short":
            (newest / "actor" / "state.json").write_text("{")
        case "lacks a file":
            (newest / "actor" / "state.json").unlink()
        case "not JSON":
            (newest / "run.json").write_text("{")
    resumption = found(copied)
    assert resumption.checkpoint == checkpoints / "step_000004"
    assert [skipped.path for skipped in resumption.skipped] == [newest]
    resumption.begin(copied)
    assert [path.name for path in checkpoints.glob("*step*")] == ["step_000004"]
    with pytest.raises(ConfigError, match=r"trainer.resume=.*step_000006"):
        found(copied, **{"trainer.resume": newest})


def test_a_run_without_a_whole_checkpoint_begins_anew_in_its_directory(copied):
    for path in (copied / "checkpoints").glob("step*"):
        (path / "run.json").unlink()
    resumption = found(copied)
    assert resumption.checkpoint is None
    assert len(resumption.skipped) == 2
    beginning = resumption.begin(copied)
    assert (beginning.epoch, beginning.state.step, beginning.actor) == (2, 0, None)
    assert rows(copied, "trajectories.jsonl") == []
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        found(copied, **{"trainer.resume": copied})


def test_auto_takes_the_newest_run(copied, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_resumption(load_config(["trainer.resume=auto"])) is None
    for age, name in enumerate(("20260102-000000-000", "20260101-000000-000", "mine")):
        path = shutil.copytree(copied, tmp_path / "runs" / name)
        os.utime(path / "config.yaml", (1e9 - age, 1e9 - age))
    (tmp_path / "runs" / "none").mkdir()
    assert found(None).run_dir == latest_run(tmp_path / "runs").resolve()
    assert found(None).run_dir == tmp_path / "runs" / "20260102-000000-000"


def test_a_checkpoint_in_another_directory_begins_a_run_of_its_own(copied, tmp_path):
    checkpoint = copied / "checkpoints" / "step_000004"
    assert found(tmp_path / "other", **{"trainer.resume": checkpoint}).run_dir is None
    moved = checkpoint.rename(tmp_path / "step_000004")
    assert found(None, **{"trainer.resume": moved}).run_dir is None


@pytest.mark.parametrize("path", ["/no/such/checkpoint", "/tmp"])
def test_what_is_no_checkpoint_is_refused(tmp_path, path):
    with pytest.raises(ConfigError, match=f"trainer.resume={path}"):
        found(tmp_path / "run", **{"trainer.resume": path})


def test_a_mock_run_has_nothing_to_resume(finished):
    with pytest.raises(ConfigError, match=r"trainer\.mock"):
        found(finished, **{"trainer.mock": "true"})


def test_a_directory_has_one_run_at_a_time(tmp_path):
    with run_lock(tmp_path), pytest.raises(ConfigError, match="another run"), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass


def test_settings_survive_being_written(tmp_path):
    config = load_config(["data.reasoning_gym={name: chain_sum, max_terms: 2}"])
    state = RunState(
        step=1,
        version="e1.s1",
        settings=shared_settings(config),
        model_digest=model_digest(MODEL),
    )
    state.write(tmp_path)
    assert read_state(tmp_path).settings == shared_settings(config)


class SavesAtOnce:
    """A train engine that cannot write behind the training."""

    def __init__(self):
        self.done = []

    def __getattr__(self, name):
        if name not in ("onload", "offload", "save_checkpoint", "load_checkpoint"):
            raise AttributeError(name)
        return lambda *arguments: self.done.append((name, *arguments))


def test_an_engine_that_cannot_write_behind_writes_at_once(tmp_path):
    worker = ActorWorker.__new__(ActorWorker)
    worker._engine = SavesAtOnce()
    worker.begin_checkpoint(str(tmp_path))
    assert worker.checkpoint_written()
    worker.finish_checkpoint(1.0)
    assert worker._engine.done == [("onload",), ("save_checkpoint", tmp_path), ("offload",)]
    worker.load_checkpoint(str(tmp_path))
    assert worker._engine.done[3:] == [("onload",), ("load_checkpoint", tmp_path), ("offload",)]


class NeverWritten:
    def begin(self, path):
        path.mkdir()

    def written(self):
        return False

    def finish(self, timeout_s):
        raise TransferTimeoutError(f"not within {timeout_s}")


def test_a_checkpoint_that_is_never_written_gets_no_name(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2, NeverWritten())
    checkpoints.begin(RunState(step=1, version="e1.s1"))
    checkpoints.settle()
    for wait in (
        lambda: checkpoints.finish(1.0),
        lambda: checkpoints.begin(RunState(step=2, version="e1.s2")),
    ):
        with pytest.raises(TransferTimeoutError):
            wait()
    assert [path.name for path in tmp_path.iterdir()] == [".step_000001.staged"]
