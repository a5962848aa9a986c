"""What one run without arguments does, says and leaves."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

from start_up import MILESTONES
from whole_runs import APP

pytestmark = pytest.mark.engine

LINES = [
    "Ray initialized.",
    "Trainer initialized. Initializing workers and rollout servers...",
    "[Init] Creating Ray resource pools.",
    "[Init] Creating actor workers.",
    "[Init] Initializing actor models.",
    "Qwen3ForCausalLM contains ",
    "Before FSDP, memory allocated (GB): ",
    "Applied FSDP wrapping.",
    "After FSDP, memory allocated (GB): ",
    "[Init] Starting rollout servers.",
    "vLLM http server: rollout_mode=",
    "Rollout servers ready: backend=vllm, replicas=1, tp_size=1, addresses=[127.0.0.1:",
    "[Init] Initializing checkpoint engine manager.",
    "Workers and rollout servers are ready.",
    "Weight sync started: sync_index=1, phase=initial, mode=fused, rollout_backend=vllm,",
    "Fused weight sync: release rollout memory before sync_index=1",
    "Fused weight sync: resume rollout weights for sync_index=1",
    "Weight sync finished: sync_index=1, phase=initial, version=e1.s0, payload_bytes=",
    "Evaluation: step=0",
    "Weight sync started: sync_index=2, phase=trained",
    "Weight sync finished: sync_index=2, phase=trained, version=e1.s1",
    "[Step 1/90] reward=",
    "[Step 90/90] reward=",
    "Evaluation: step=90",
    "Model saved: ",
    "Run finished: status=ok, run_dir=",
    "Shutting down actors.",
]


def test_it_ends_well_and_learns(default_run):
    assert default_run.code == 0, default_run.log
    summary = default_run.summary
    assert summary["status"] == "ok"
    assert summary["steps"] == 90
    assert summary["reward"]["first"] <= 0.3
    assert summary["reward"]["last"] >= 0.8
    assert summary["eval"]["first"]["reward"] <= 0.3
    assert summary["eval"]["last"]["reward"] >= 0.8


def test_the_log_has_its_lines_in_order_and_nothing_else(default_run):
    default_run.tells_in_order(LINES)
    steps = [line for line in default_run.lines if "[Step " in line]
    assert len(steps) == 90
    assert all(re.match(r"\[MiniRL\] \[Step \d+/90\] reward=\S+, loss=\S+, ", s) for s in steps)
    assert [line for line in default_run.lines if not line.startswith("[MiniRL] ")] == []


def test_the_milestones_that_start_up_is_measured_by_are_lines_of_it(default_run):
    for milestone in MILESTONES:
        expected = milestone.replace("1/1]", "1/90]")
        assert any(line.startswith(expected) for line in default_run.lines), expected


def test_nothing_of_it_is_left_running(default_run):
    assert default_run.code is not None
    assert default_run.left() == []


def test_the_engine_samples_from_the_policy_that_is_trained(default_run):
    for line in default_run.metrics:
        assert line["rollout_train_logprob_diff/mean"] <= 1e-5
        assert line["rollout_train_logprob_diff/max"] <= 1e-4


def test_every_step_was_preceded_by_a_sync_of_its_version(default_run):
    versions = [sync["version"] for sync in default_run.summary["syncs"]]
    assert versions == [f"e1.s{step}" for step in range(91)]
    served = [line["policy_version"] for line in default_run.metrics]
    assert served == versions[:-1]


def test_every_token_is_traceable(default_run):
    trajectories = default_run.trajectories
    assert len(trajectories) == 90 * 32 * 8
    assert [item["index"] for item in trajectories] == list(range(len(trajectories)))
    for item in trajectories:
        size = len(item["response_ids"])
        assert len(item["rollout_log_probs"]) == len(item["loss_mask"]) == size > 0
        version = f"e1.s{item['index'] // 256}"
        assert item["policy_version_spans"] == [[version, 0, size]]
        assert item["seed"] == item["sampling_params"]["seed"]
        assert item["group_index"] == item["index"] // 8
    seeds = {item["seed"] for item in trajectories}
    assert len(seeds) > 0.999 * len(trajectories)


def test_the_metrics_are_complete(default_run):
    phases = "generate reward old_log_prob ref advantage update_actor sync eval save other step"
    names = {f"timing_s/{phase}" for phase in phases.split()}
    names |= {"step", "policy_version", "reward/mean", "reward/std", "loss", "grad_norm", "lr"}
    names |= {"kl", "entropy", "response_length/mean", "tokens_per_second"}
    names |= {"rollout_train_logprob_diff/mean", "rollout_train_logprob_diff/max"}
    for number, line in enumerate(default_run.metrics, start=1):
        assert names <= line.keys()
        assert line["step"] == number
        assert all(math.isfinite(v) for v in line.values() if isinstance(v, float))


def test_the_phases_account_for_the_time_of_a_step(default_run):
    step, other = (
        sum(line[f"timing_s/{name}"] for line in default_run.metrics) for name in ("step", "other")
    )
    assert 0 <= other <= 0.05 * step


def test_the_run_directory_is_complete(default_run):
    names = {path.name for path in default_run.run_dir.iterdir()}
    expected = {"config.yaml", "summary.json", "metrics.jsonl", "trajectories.jsonl"}
    assert expected | {"reward.png", "logs", "checkpoints"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert (default_run.run_dir / "checkpoints" / "final" / "config.json").exists()
    logs = {path.name for path in (default_run.run_dir / "logs").iterdir()}
    assert {"driver.log", "actor_0.log", "actor_1.log", "rollout_0_0.log"} <= logs
    assert {"vllm-0-server.log", "vllm-0-engine.log"} <= logs


def test_ray_starts_its_workers_in_the_drivers_environment(default_run):
    """Under `uv run` it would copy the working directory and call uv for each of them."""
    assert (
        "packaging the working directory"
        not in (default_run.run_dir / "logs" / "driver.log").read_text()
    )


def test_its_recorded_samples_train_another_actor_in_the_same_way(default_run, runner):
    """Without an engine: the first five steps, all of the warm-up, repeat the run's own."""
    run = runner.complete(
        f"debug.train_only={default_run.run_dir}", "trainer.total_training_steps=6", timeout=120
    )
    assert run.code == 0, run.log
    assert run.left() == []
    assert run.summary["syncs"] == []
    assert "Starting rollout servers" not in run.log
    for ours, theirs in zip(run.metrics[:5], default_run.metrics, strict=False):
        for name in ("reward/mean", "policy_version", "lr"):
            assert ours[name] == theirs[name]
        for name in ("loss", "grad_norm", "entropy", "rollout_train_logprob_diff/mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7)
    assert (run.run_dir / "checkpoints" / "final" / "config.json").exists()


def test_show_tells_of_it(default_run):
    done = subprocess.run(
        [sys.executable, str(APP), "show", str(default_run.run_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ok, fused, vllm, 90 steps" in done.stdout
    assert "reward, 90 steps: first 0.0" in done.stdout
    assert "e1.s89" in done.stdout


def test_the_peak_memory_is_that_of_a_laptop(default_run):
    assert 0 < default_run.summary["peak_memory_pss_bytes"] <= 8e9
