"""However a run ends, nothing of it is left, and the cause is printed once.

A signal in the loop, and the death of an engine in it, end the runs of test_negative_controls.py;
a member that native code aborts ends one of test_separate.py.
"""

import json
import signal

import pytest
import torch
from endings import interrupt
from readmes import app_arguments, commands, program, write_example
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from whole_runs import ONE_ACTOR, Runner

from minirl.tiny_model import ensure_tiny_model

pytestmark = pytest.mark.engine


def assert_loads(checkpoint, model, converted):
    """The training state is whole: every parameter of the model, with its two moments."""
    dcp_to_torch_save(checkpoint, converted)
    state = torch.load(converted)
    assert {name for name in state if name.startswith("rng.")} == {"rng.0.host", "rng.1.host"}
    state = {name: tensor for name, tensor in state.items() if not name.startswith("rng.")}
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    stored = load_file(model / "model.safetensors")
    shapes = sorted(3 * [tuple(tensor.shape) for tensor in stored.values()])
    assert sorted(tuple(tensor.shape) for tensor in state.values() if tensor.dim()) == shapes


STARTED, RESUMED = (command for command in commands() if "trainer.run_dir=my_run" in command)
OWN_DATA = next(command for command in commands() if "data.path=" in command)
BROKEN = """
calls = 0
def reward(prompts, **columns):
    global calls
    calls += 1
    rewards = [0.5] * len(prompts)
    rewards[17] = float('nan') if calls == 3 else 0.0
    return rewards
"""


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two at once on this host, and what the first was started with.

    The first is the README's example of own data, on two actor ranks, with a reward that fails in
    step 3. The second would go on for ever.
    """
    path = tmp_path_factory.mktemp("failed")
    own = write_example(path)
    (path / "reward.py").write_text(BROKEN)
    made = Runner(path)
    arguments = (
        *app_arguments(OWN_DATA),
        *own,
        "trainer.keep_last=1",
        "checkpoint_engine.debug.verify_light_transfer=true",
    )
    failing = made.start(*app_arguments(STARTED), *arguments, "trainer.save_freq=1")
    endless = made.start("trainer.total_training_steps=100000", *ONE_ACTOR)
    yield failing, endless, arguments
    made.close()


def test_a_signal_while_ray_starts_ends_it(runner):
    """To the whole group: what Ray has started ends, too, and `ray.init` waits for it in vain."""
    run = runner.start(*ONE_ACTOR)
    sessions = "minirl-ray-*/session_*"
    run.wait_until(lambda: any(run.temporary.glob(sessions)), sessions, 60)
    interrupt(run, signal.SIGTERM)


def test_a_signal_while_servers_start_ends_it(two_runs):
    """And nothing of the other run, as the next tests show."""
    _, endless, _ = two_runs
    endless.wait_for("Starting rollout servers", 180)
    interrupt(endless, signal.SIGTERM)


@pytest.fixture(scope="module")
def failed_run(two_runs):
    """The first of the two, ended, its reward function mended, and what it was started with."""
    failing, _, arguments = two_runs
    failing.finish(400)
    broken = failing.path.parent / "reward.py"
    broken.write_text(program("reward.py"))
    return failing, arguments


def test_a_reward_function_that_fails_names_the_sample_and_keeps_the_checkpoint(
    failed_run, tmp_path
):
    run, _ = failed_run
    assert run.code == 1, run.log
    assert run.left() == []
    causes = [line for line in run.lines if "Run failed" in line]
    assert len(causes) == 1
    assert "17" in causes[0]
    assert "nan" in causes[0].lower()
    (checkpoint,) = (run.run_dir / "checkpoints").iterdir()
    assert checkpoint.name == "step_000002"
    assert_loads(checkpoint / "actor", ensure_tiny_model(), tmp_path / "loaded.pt")
    assert run.summary["steps"] == 2


def test_it_goes_on_from_there_on_another_number_of_ranks(failed_run, runner):
    """The reward function was mended, and the engine gets what the run before had published."""
    failed, arguments = failed_run
    checkpoints = failed.run_dir / "checkpoints"
    saved = json.loads((checkpoints / "step_000002" / "run.json").read_text())
    before = failed.trajectories
    half = checkpoints / ".step_000003.staged"
    half.mkdir()
    run = runner.complete(
        *app_arguments(RESUMED),
        *arguments,
        *ONE_ACTOR,
        "trainer.total_training_steps=4",
        run_dir=failed.run_dir,
    )
    assert run.code == 0, run.log
    assert run.left() == []
    run.tells_in_order(
        [
            f"Checkpoint skipped: path={half}, why=half-written",
            f"Run resumed: checkpoint={checkpoints / 'step_000002'}, step=2, run_epoch=2",
            "Light transfer verification passed: ",
            "Weight sync finished: sync_index=1, phase=initial, version=e2.s2",
            "[Step 3/4] reward=",
        ]
    )
    first = run.summary["syncs"][0]
    assert first["weights_digest"] == saved["weights_digest"] is not None
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    assert [line["policy_version"] for line in run.metrics] == ["e1.s0", "e1.s1", "e2.s2", "e2.s3"]
    assert [item["index"] for item in run.trajectories] == list(range(4 * 256))
    assert run.trajectories[: len(before)] == before
    assert run.summary["steps"] == 4
    assert {path.name for path in checkpoints.iterdir()} == {"step_000002", "final"}
    for line in run.metrics:
        assert line["rollout_train_logprob_diff/mean"] <= 1e-5
