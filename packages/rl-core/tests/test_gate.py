import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl_core.deadlines import Deadline
from rl_core.errors import LifecycleError, ReplicaFencedError, TransferTimeoutError
from rl_core.gate import ServingGate
from rl_core.publish import Action, Begin, Commit, Failed, Outdated, Received, Verified
from rl_core.versions import PolicyVersion

VERSION = PolicyVersion(1, 0)


def publish(gate, version=VERSION):
    for event in (Begin(version), Received(version), Verified(version), Commit(version)):
        actions = gate.apply(event)
    return actions


def test_refuses_until_committed_and_says_why():
    gate = ServingGate("replica 3")
    assert gate.refusal() == "replica 3 has no weights yet (joining); sync it first"
    with pytest.raises(ReplicaFencedError, match="replica 3 has no weights"), gate.admit():
        pass
    assert publish(gate) == (Action.FLUSH_KV, Action.OPEN_GATE)
    assert gate.refusal() is None
    with gate.admit() as state:
        assert state.committed == VERSION


def test_refusals_name_the_cause():
    gate = ServingGate("replica")
    publish(gate)
    gate.apply(Outdated())
    assert "between versions (stale)" in gate.refusal()
    gate.apply(Failed("rank 1 went away"))
    gate.apply(Failed("and so everything else failed"))
    assert gate.refusal() == "replica is fenced: rank 1 went away"


def test_a_refused_event_changes_nothing():
    gate = ServingGate("replica")
    publish(gate)
    before = gate.state
    with pytest.raises(LifecycleError):
        gate.apply(Commit(VERSION))
    assert gate.state == before
    assert gate.refusal() is None


def test_requests_in_flight_are_counted_also_when_they_fail():
    gate = ServingGate("replica")
    publish(gate)
    with gate.admit(), gate.admit():
        assert gate.in_flight == 2
        gate.apply(Failed("stop"))
        with pytest.raises(ReplicaFencedError), gate.admit():
            pass
        assert gate.in_flight == 2
    assert gate.in_flight == 0
    publish(gate, VERSION.next_step())
    with pytest.raises(KeyError), gate.admit():
        raise KeyError
    assert gate.in_flight == 0


def test_waiting_for_requests_ends_with_the_last_one_or_the_deadline():
    gate = ServingGate("replica")
    publish(gate)
    release = threading.Event()

    def request():
        with gate.admit():
            release.wait(10)

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(request) for _ in range(3)]
        while gate.in_flight < 3:
            time.sleep(0.001)
        with pytest.raises(TransferTimeoutError, match="3 requests still in flight"):
            gate.wait_idle(Deadline.after(0.01))
        waiting = pool.submit(gate.wait_idle, Deadline.after(10))
        release.set()
        waiting.result(10)
        for future in running:
            future.result(10)
    assert gate.in_flight == 0


def test_no_request_is_admitted_once_an_update_has_begun():
    """Many threads ask while versions change: whoever is admitted sees a committed version."""
    gate = ServingGate("replica")
    stop = threading.Event()
    admitted = []

    def ask():
        while not stop.is_set():
            try:
                with gate.admit() as state:
                    assert state.serving
                    admitted.append(state.committed)
            except ReplicaFencedError:
                time.sleep(0)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        for step in range(50):
            publish(gate, PolicyVersion(1, step))
            time.sleep(0.0005)
        stop.set()
        for future in asking:
            future.result(10)
    assert gate.in_flight == 0
    assert set(admitted) <= {PolicyVersion(1, step) for step in range(50)}
