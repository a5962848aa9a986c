"""Every command of the READMEs is run here or by the test that is named beside it."""

import re
import subprocess

import pytest
from readmes import ROOT, app_arguments, commands, write_example
from whole_runs import ONE_ACTOR

pytestmark = pytest.mark.engine

SHORT = ("trainer.total_training_steps=1", "data.eval_size=0", *ONE_ACTOR)
SMALL = ("data.train_batch_size=2", "algorithm.ppo_mini_batch_size=8")

ELSEWHERE = {
    "uv run apps/minirl": "tests/test_default_run.py",
    "uv run pytest": "this run",
    "uv run tools/property_matrix.py": "tests/test_property_matrix.py, a part of it",
    "uv run tools/property_matrix.py --kind dense --dtype bfloat16": "the same",
    "uv run tools/property_matrix.py --kind dense --tp 1 --defect all": "the same",
    "uv pip install --overrides tools/cpu-overrides.txt packages/* 'apps/minirl[reasoning-gym]' "
    "'packages/rl-rollout-vllm[cpu]' 'packages/rl-rollout-sglang[cpu]' "
    "'packages/rl-ckpt-mooncake[cpu]'": ("tools/check_distributions.py, a job of its own in CI"),
    "uv run apps/minirl rollout.tensor_model_parallel_size=2 rollout.temperature=0.7 "
    "trainer.seed=2": "tests/test_served_weights.py",
    "uv pip install --no-config packages/* apps/minirl": "tests/test_beside_engines.py",
    "python -m minirl.main doctor": "tests/test_smoke_script.py",
    "bash tools/npu_smoke.sh MODEL npu": "tests/test_smoke_script.py",
    "uv run apps/minirl verify DIR HOST:PORT": "tests/test_verify.py",
    "uv run apps/minirl data.task=task.py": "tests/test_late_replica.py",
    "uv run apps/minirl show RUN": "tests/test_default_run.py",
    "uv run apps/minirl debug.train_only=RUN": "tests/test_default_run.py",
    "uv run apps/minirl data.path=prompts.jsonl reward.path=reward.py data.eval_size=0": (
        "tests/test_endings.py"
    ),
    "uv run apps/minirl trainer.run_dir=my_run trainer.save_freq=10": "tests/test_endings.py",
    "uv run apps/minirl trainer.run_dir=my_run trainer.save_freq=10 trainer.resume=auto": (
        "tests/test_endings.py"
    ),
    "uv run apps/minirl config=separate checkpoint_engine.backend=hccl": "tests/test_separate.py",
}


RUN_HERE = [command for command in commands() if command not in ELSEWHERE]


@pytest.mark.parametrize("command", RUN_HERE)
def test_it_runs(command, runner, tmp_path):
    arguments = app_arguments(command)
    if arguments[0] in ("fetch", "version", "doctor"):
        done = subprocess.run(
            ["uv", "run", "--no-sync", "apps/minirl", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return
    write_example(tmp_path)
    for name in ("prompts.parquet", "reward.py"):
        arguments = [
            re.sub(rf"(?<=[=\[,]){re.escape(name)}", f"{tmp_path}/{name}", item)
            for item in arguments
        ]
    small = SMALL if "config=smollm2" in arguments else ()
    run = runner.complete(*arguments, *SHORT, *small, timeout=300)
    assert run.code == 0, run.log
    assert run.summary["status"] == "ok"
    if "debug.rollout_only=true" in arguments:
        check_rollout_only(run)
        return
    for line in run.metrics:
        limit = 1e-5 if "config=smollm2" not in arguments else 0.1
        assert line["rollout_train_logprob_diff/mean"] <= limit


def check_rollout_only(run):
    """Samples and what two reward functions say of them; nothing was trained."""
    (line,) = run.metrics
    assert [sync["phase"] for sync in run.summary["syncs"]] == ["initial"]
    assert "loss" not in line
    assert "reward/reward/mean" in line
    assert "reward/brief/mean" in line
    for sample in run.trajectories:
        parts = sample["rewards"]
        assert sample["reward"] == pytest.approx(parts["reward"] + 0.2 * (parts["brief"] or 0.0))
        assert sample["advantage"] is None
        assert sum(sample["loss_mask"]) == 0
        assert sample["policy_version_spans"] == [["e1.s0", 0, len(sample["response_ids"])]]
