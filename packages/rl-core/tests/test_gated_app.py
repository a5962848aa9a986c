"""HTTP requests pass the same gate as calls, and count as in flight until they end."""

import asyncio
import json

import pytest

from rl_core.gate import ServingGate
from rl_core.publish import Begin, Commit, Failed, Received, Verified
from rl_core.rollout.gated_app import OPEN_PATHS, GatedApp
from rl_core.versions import PolicyVersion

V1 = PolicyVersion(1, 1)


@pytest.fixture
def gate():
    return ServingGate("replica 0")


def open_gate(gate):
    for event in (Begin(V1), Received(V1), Verified(V1), Commit(V1)):
        gate.apply(event)


def request(gate, path="/v1/completions", kind="http"):
    sent = []
    seen = []

    async def app(scope, receive, send):
        seen.append(gate.in_flight)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    asyncio.run(GatedApp(app, gate)({"type": kind, "path": path}, None, send))
    return sent, seen


def test_a_request_is_refused_with_the_reason_before_the_first_commit(gate):
    sent, seen = request(gate)
    assert seen == []
    assert sent[0]["status"] == 503
    problem = json.loads(sent[1]["body"])["error"]
    assert problem["type"] == "ReplicaFencedError"
    assert "no weights yet" in problem["message"]


def test_a_committed_replica_answers_and_counts(gate):
    open_gate(gate)
    sent, seen = request(gate)
    assert sent[0]["status"] == 200
    assert seen == [1]
    assert gate.in_flight == 0


def test_a_fenced_replica_says_why(gate):
    open_gate(gate)
    gate.apply(Failed("digest mismatch in 'w'"))
    sent, _ = request(gate)
    assert "digest mismatch in 'w'" in sent[1]["body"].decode()


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_paths_that_compute_nothing_are_always_open(gate, path):
    sent, _ = request(gate, path)
    assert sent[0]["status"] == 200


def test_websockets_are_closed(gate):
    open_gate(gate)
    sent, seen = request(gate, "/v1/realtime", "websocket")
    assert seen == []
    assert sent == [{"type": "websocket.close", "code": 1013}]
