"""However a run ends, nothing of it is left, and the cause is printed once."""

import os
import signal
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from whole_runs import Death

from minirl.tiny_model import ensure_tiny_model

pytestmark = pytest.mark.engine

LIMIT_S = 30
ONE_ACTOR = ("cluster.actor.n_gpus_per_node=1", "actor.engine_config.fsdp_size=1")
ENDLESS = ("trainer.total_training_steps=100000", *ONE_ACTOR)


def ended(run, began, code):
    """Check the end of a run that was told to end at `began`."""
    run.finish(LIMIT_S)
    assert time.monotonic() - began <= LIMIT_S
    assert run.code == code, run.log
    assert run.left() == []
    assert "Traceback" not in run.log
    return run


def engine_process(run):
    """A process that the rollout server started."""
    names = {pid: psutil.Process(pid).cmdline() for pid in run.processes()}
    hosts = [pid for pid, line in names.items() if any("ObjectHost" in part for part in line)]
    children = [child.pid for pid in hosts for child in psutil.Process(pid).children()]
    assert children, names
    return children[0]


def assert_loads(checkpoint, model, converted):
    """The training state is whole: every parameter of the model, with its two moments."""
    dcp_to_torch_save(checkpoint, converted)
    state = torch.load(converted)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    stored = load_file(model / "model.safetensors")
    shapes = sorted(3 * [tuple(tensor.shape) for tensor in stored.values()])
    assert sorted(tuple(tensor.shape) for tensor in state.values() if tensor.dim()) == shapes


@pytest.mark.parametrize(
    ("number", "when"),
    [(signal.SIGTERM, "Starting rollout servers"), (signal.SIGINT, "[Step 2/")],
)
def test_a_signal_ends_it(runner, number, when):
    run = runner.start(*ENDLESS)
    run.wait_for(when, 180)
    began = time.monotonic()
    # To the whole process group, as a terminal does it.
    os.killpg(run.process.pid, number)
    ended(run, began, 128 + number)
    name = signal.Signals(number).name
    assert len([line for line in run.lines if f"interrupted by {name}" in line]) == 1
    assert run.summary["status"] == "interrupted"


def test_a_killed_engine_ends_it_with_the_cause(runner):
    run = runner.start(*ENDLESS)
    run.wait_for("[Step 1/", 180)
    began = time.monotonic()
    os.kill(engine_process(run), signal.SIGKILL)
    ended(run, began, 1)
    causes = [line for line in run.lines if "Run failed" in line]
    assert len(causes) == 1, run.log
    # In the middle of a sync it is the actor rank feeding the engine that notices.
    assert "replica 0" in causes[0] or "engine" in causes[0]


def test_a_member_aborted_in_a_sync_ends_it_with_its_last_words(runner, tmp_path):
    """One of the 44 that tools/kill_members.py kills; an engine has its own test above."""
    death = Death(runner, "mooncake", "checkpoint_worker", "midway:native", tmp_path)
    assert death.ended_well, death.run.log
    assert "checkpoint_worker rank 0 died: free(): invalid pointer; *** SIGABRT" in death.causes[0]
    assert "checkpoint_worker_0.log" in death.causes[0]


def test_a_reward_function_that_fails_names_the_sample_and_keeps_the_checkpoint(runner, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "calls = 0\n"
        "def reward(prompts, **columns):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    rewards = [0.5] * len(prompts)\n"
        "    rewards[17] = float('nan') if calls == 3 else 0.0\n"
        "    return rewards\n"
    )
    run = runner.complete(
        f"reward.path={reward}",
        "data.eval_size=0",
        "trainer.save_freq=1",
        "trainer.keep_last=1",
        *ONE_ACTOR,
    )
    assert run.code == 1, run.log
    assert run.left() == []
    causes = [line for line in run.lines if "Run failed" in line]
    assert len(causes) == 1
    assert "17" in causes[0]
    assert "nan" in causes[0].lower()
    (checkpoint,) = (run.run_dir / "checkpoints").iterdir()
    assert checkpoint.name == "step_000002"
    assert_loads(checkpoint, ensure_tiny_model(), tmp_path / "loaded.pt")
    assert run.summary["steps"] == 2
