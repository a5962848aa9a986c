"""A replica that comes up late gets the version served before its first request."""

import json
import re

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("witnessed")]

STEPS = 3


def test_the_late_replica_serves_what_is_published(witnessed_runs):
    """The task is the README's own, in one file."""
    run = witnessed_runs["hccl"]
    assert run.code == 0, run.log
    served = [json.loads(line) for line in (run.path / "served.jsonl").read_text().splitlines()]
    served = [line for line in served if re.match(r"s\d+\.", line[1])]  # those of the run's steps
    by_step = {f"s{step}": set() for step in range(1, STEPS + 1)}
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
    assert len(run.metrics) == STEPS
    for line in run.metrics:
        assert line["rollout_train_logprob_diff/max"] <= 1e-4
        assert line["reward/task/mean"] == line["reward/mean"]
    assert {item["rewards"]["task"] for item in run.trajectories} <= {0.0, 0.1, 1.0}
    assert all(
        re.fullmatch(r"(after|next to|follows) [a-y]:", t["prompt"]) for t in run.trajectories
    )


def test_it_is_brought_up_to_date_by_a_sync_of_its_own(witnessed_runs):
    run = witnessed_runs["hccl"]
    done = run.summary["syncs"][: STEPS + 2]
    assert [(sync["phase"], sync["version"], sync["replicas"]) for sync in done] == [
        ("initial", "e1.s0", [0]),
        ("trained", "e1.s1", [0]),
        ("joining", "e1.s1", [1]),
        ("trained", "e1.s2", [0, 1]),
        ("trained", "e1.s3", [0, 1]),
    ]
    # Every replica that took part was looked into, each with a report of its own.
    held = done[0]["live"]["matched"]
    for sync in done:
        counts = dict(sync["live"])
        assert counts.pop("matched") == held * len(sync["replicas"])
        assert not any(counts.values())
        for replica, report in zip(sync["replicas"], sync["live_reports"], strict=True):
            assert f"vllm_hccl_replica{replica}_rollout{replica}_" in report
    digests = [sync["weights_digest"] for sync in done]
    assert digests[1] == digests[2]
    assert "Rollout servers ready: backend=vllm, replicas=1" in run.log
    assert len([line for line in run.lines if "Rollout replica joined: replica=1" in line]) == 1
