"""Separate mode: every checkpoint engine carries weights into a real engine, verified."""

import json

import pytest
from witnesses import SERVED

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("witnessed")]


@pytest.mark.parametrize("backend", ["hccl", "mooncake", "disk"])
def test_weights_travel_and_are_verified(witnessed_runs, backend):
    run = witnessed_runs[backend]
    assert run.code == 0, run.log
    assert run.left() == []
    syncs = run.summary["syncs"]
    # e1.s4 is the one that was tampered with.
    assert [sync["version"] for sync in syncs] == ["e1.s0", "e1.s1", "e1.s2", "e1.s3", "e1.s5"]
    assert {sync["backend"] for sync in syncs} == {backend}
    for line in run.metrics:
        assert line["rollout_train_logprob_diff/mean"] <= 1e-5
        assert line["rollout_train_logprob_diff/max"] <= 1e-4
    for sync in syncs:
        assert sync["light"]["matched"] > 0
        assert sync["light"]["mismatched"] == 0
    digests = [sync["weights_digest"] for sync in syncs]
    assert len(set(digests)) == 4
    assert digests[3] == digests[4]
    # A trajectory names the digest of the weights that sampled it.
    assert {item["weights_digest"] for item in run.trajectories} == set(digests[:3])


def test_actors_and_replicas_on_different_nodes(witnessed_runs):
    run = witnessed_runs["hccl"]
    nodes = json.loads((run.run_dir / SERVED).read_text())["nodes"]
    assert len(set(nodes["actor"])) == 1
    assert not set(nodes["actor"]) & set(nodes["rollout"])
