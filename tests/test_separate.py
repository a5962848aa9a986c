"""Separate mode: every checkpoint engine carries weights into a real engine, verified."""

import json
import re

import pytest
from whole_runs import ENDED_S, ON_TWO_NODES, WITNESSED
from witnesses import ABORT, SERVED

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("witnessed")]


BACKENDS = ["hccl", "mooncake", "disk"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_travel_and_are_verified(witnessed_runs, backend):
    run = witnessed_runs[backend]
    assert run.code == (1 if ABORT in run.arguments else 0), run.log
    assert run.left() == []
    syncs = run.summary["syncs"]
    assert [sync["sync_index"] for sync in syncs] == list(range(1, len(syncs) + 1))
    syncs = [sync for sync in syncs if sync["phase"] != "joining"]
    if ABORT in run.arguments:
        syncs.pop()  # the one that it ended in
    assert [sync["version"] for sync in syncs] == [f"e1.s{step}" for step in range(7)]
    assert {sync["backend"] for sync in syncs} == {backend}
    tampered, flipped = syncs.pop(4), syncs.pop(4)
    assert flipped["light"]["mismatched"] == 0
    check_tampered(tampered, json.loads((run.run_dir / SERVED).read_text())["tampered"])
    for line in run.metrics:
        assert line["rollout_train_logprob_diff/mean"] <= 1e-5
        assert line["rollout_train_logprob_diff/max"] <= 1e-4
    for sync in syncs:
        assert sync["error"] is None
        counts = dict(sync["light"])
        assert counts.pop("matched") > 0
        assert counts == {"mismatched": 0, "missing": 0, "unexpected": 0, "unverifiable": 0}
    digests = [sync["weights_digest"] for sync in syncs]
    assert len(set(digests)) == 4
    assert digests[3] == digests[4]
    # A trajectory names the digest of the weights that sampled it.
    assert {item["weights_digest"] for item in run.trajectories} == set(digests[:3])


def check_tampered(sync, told):
    """The sync in which a byte was flipped has a record that says so, and published nothing."""
    assert sync["light"]["mismatched"] >= 1
    assert sync["weights_digest"] is None
    assert sync["error"] == told["error"]
    assert re.search(r"tensor '([^']+)'", sync["error"])[1] == told["tensor"]


@pytest.mark.parametrize("backend", ON_TWO_NODES)
def test_actors_and_replicas_on_different_nodes(witnessed_runs, backend):
    run = witnessed_runs[backend]
    nodes = json.loads((run.run_dir / SERVED).read_text())["nodes"]
    assert len(set(nodes["actor"])) == 1
    assert not set(nodes["actor"]) & set(nodes["rollout"])


def test_a_member_aborted_in_a_sync_ends_the_run_with_its_last_words(witnessed_runs):
    """One of the deaths that tools/kill_members.py goes through; an engine's is elsewhere.

    The run has a Ray of its own, so that its processes are known by its mark.
    """
    [name] = [name for name, (_, arguments) in WITNESSED.items() if ABORT in arguments]
    assert name not in ON_TWO_NODES
    run = witnessed_runs[name]
    assert run.code == 1
    assert run.summary["status"] == "failed"
    causes = [line for line in run.lines if "Run failed" in line]
    assert len(causes) == 1, run.log
    assert "checkpoint_worker rank 0 died: free(): invalid pointer; *** SIGABRT" in causes[0]
    assert "checkpoint_worker_0.log" in causes[0]
    assert run.summary["syncs"][-1]["error"] is not None
    assert run.ended - (run.run_dir / SERVED).stat().st_mtime <= ENDED_S
    assert run.left() == []
