"""A replica that comes up late gets the version served before its first request."""

import json
import re
from pathlib import Path

import pytest
from readme_programs import readme_program
from whole_runs import VERIFIED

pytestmark = pytest.mark.engine

PROGRAM = Path(__file__).parent / "late_run.py"
ARGUMENTS = (
    "config=separate",
    "cluster.rollout.n_gpus_per_node=2",
    "rollout.min_replicas=1",
    "cluster.actor.n_gpus_per_node=1",
    "actor.engine_config.fsdp_size=1",
    "trainer.total_training_steps=3",
    "data.eval_size=0",
    "checkpoint_engine.debug.verify_replicas=all",
)


def test_the_late_replica_serves_what_is_published(runner, tmp_path):
    """The task is the README's own, in one file."""
    (tmp_path / "task.py").write_text(readme_program("task.py"))
    task = f"data.task={tmp_path / 'task.py'}"
    run = runner.complete(str(tmp_path), task, *ARGUMENTS, *VERIFIED, program=PROGRAM)
    assert run.code == 0, run.log
    assert run.left() == []

    served = [json.loads(line) for line in (tmp_path / "served.jsonl").read_text().splitlines()]
    by_step = {f"s{step}": set() for step in (1, 2, 3)}
    for replica, request, versions in served:
        by_step[request.partition(".")[0]].add((replica, *versions))
    assert by_step == {
        "s1": {(0, "e1.s0")},
        "s2": {(0, "e1.s1"), (1, "e1.s1")},
        "s3": {(0, "e1.s2"), (1, "e1.s2")},
    }
    # What the servers say of each request is what the trajectories say.
    spans = {
        item["rollout_id"]: [version for version, _, _ in item["policy_version_spans"]]
        for item in run.trajectories
    }
    assert spans == {request: versions for _, request, versions in served}
    # And those were the weights: the trainer's log-probabilities agree.
    assert len(run.metrics) == 3
    for line in run.metrics:
        assert line["rollout_train_logprob_diff/max"] <= 1e-4
        assert line["reward/task/mean"] == line["reward/mean"]
    assert {item["rewards"]["task"] for item in run.trajectories} <= {0.0, 0.1, 1.0}
    assert all(
        re.fullmatch(r"(after|next to|follows) [a-y]:", t["prompt"]) for t in run.trajectories
    )

    syncs = [(sync["phase"], sync["version"], sync["replicas"]) for sync in run.summary["syncs"]]
    assert syncs == [
        ("initial", "e1.s0", [0]),
        ("trained", "e1.s1", [0]),
        ("joining", "e1.s1", [1]),
        ("trained", "e1.s2", [0, 1]),
        ("trained", "e1.s3", [0, 1]),
    ]
    # Every replica that took part was looked into, each with a report of its own.
    held = run.summary["syncs"][0]["live"]["matched"]
    for sync in run.summary["syncs"]:
        counts = dict(sync["live"])
        assert counts.pop("matched") == held * len(sync["replicas"])
        assert not any(counts.values())
        for replica, report in zip(sync["replicas"], sync["live_reports"], strict=True):
            assert f"vllm_hccl_replica{replica}_rollout{replica}_" in report
    digests = [sync["weights_digest"] for sync in run.summary["syncs"]]
    assert digests[1] == digests[2]
    assert "Rollout servers ready: backend=vllm, replicas=1" in run.log
    assert len([line for line in run.lines if "Rollout replica joined: replica=1" in line]) == 1
