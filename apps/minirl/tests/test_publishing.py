"""A publish with a fault at one replica of two: what is served, and by whom."""

import asyncio

import msgspec
import pytest
import two_replicas
from publish_faults import FAULTS, dies, flipped, raises, refuses
from two_replicas import LIMIT_S, QKV, Fleet, request

from minirl import checkpoint_manager
from minirl.generation_watch import StalledError
from rl_core.errors import (
    DigestMismatchError,
    MiniRLError,
    ReplicaFencedError,
    RolloutError,
    TransferError,
    TransferTimeoutError,
)
from rl_core.trajectory import GenerateRequest, SamplingParams
from rl_core.versions import PolicyVersion


@pytest.fixture
def make_fleet(monkeypatch, tmp_path):
    two_replicas.patch(monkeypatch)
    made = []

    def make(**options):
        made.append(Fleet(tmp_path, **options))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_get_the_version_and_go_on(make_fleet, monkeypatch, caplog, fault, victim):
    caplog.set_level("INFO")
    fleet, survivor = make_fleet(goes_on=True), 1 - victim
    fleet.publish(0)
    before = fleet.ask()
    assert {str(versions) for versions, _ in before} == {"{'e1.s0'}"}
    with monkeypatch.context() as harming:
        FAULTS[fault](fleet, victim, harming)
        fleet.watch()
        record = fleet.publish(1)
        fleet.stop_watching()

    initial, failed, repeated = fleet.sync.records
    assert initial.error is None
    assert (failed.replicas, failed.version, list(failed.given_up)) == ([0, 1], "e1.s1", [victim])
    assert failed.error is not None
    assert failed.weights_digest is None
    assert repeated is record
    assert (record.replicas, record.version, record.error) == ([survivor], "e1.s1", None)
    assert (record.repeats, record.phase, record.given_up) == (2, "trained", {})
    assert record.live["matched"] > 0
    assert caplog.text.count("Rollout replica given up: ") == 1
    assert f"given up: replica={victim}, left=[{survivor}], why=" in caplog.text

    after = fleet.ask()
    assert {str(versions) for versions, _ in after} == {"{'e1.s1'}"}
    committed = [survivor, victim] if fault == "commit: no answer" else [survivor]
    assert_only_whole_versions(fleet, committed, before[0][1], after[0][1])
    with pytest.raises(MiniRLError):
        fleet.ask_server(victim, fleet.servers[victim])
    assert fleet.publish(2).replicas == [survivor]
    assert {str(versions) for versions, _ in fleet.ask()} == {"{'e1.s2'}"}


def assert_only_whole_versions(fleet, committed, old, new):
    """Whoever asked a server directly, meanwhile, got a version that was served, and all of it."""
    assert old != new
    told = [(replica, *sorted(versions), tokens) for replica, versions, tokens in fleet.answers]
    right = [(replica, "e1.s0", old) for replica in (0, 1)]
    right += [(replica, "e1.s1", new) for replica in committed]
    assert [answer for answer in told if answer not in right] == []


@pytest.mark.parametrize("fault", [name for name in FAULTS if "refused" in name or "dies" in name])
def test_unless_told_otherwise_the_run_stops_and_nobody_answers(make_fleet, monkeypatch, fault):
    fleet = make_fleet(goes_on=False)
    fleet.publish(0)
    with monkeypatch.context() as harming:
        FAULTS[fault](fleet, 1, harming)
        with pytest.raises(MiniRLError):
            fleet.publish(1)
    assert len(fleet.sync.records) == 2
    assert fleet.sync.records[1].error is not None
    for replica, server in enumerate(fleet.servers):
        with pytest.raises(MiniRLError):
            fleet.ask_server(replica, server)


def test_the_reason_is_told_by_the_replica_and_in_the_record(make_fleet, monkeypatch):
    fleet = make_fleet(goes_on=True)
    fleet.publish(0)
    with monkeypatch.context() as harming:
        flipped(fleet, 1, harming)
        fleet.publish(1)
    assert QKV in fleet.sync.records[1].given_up[1]
    with pytest.raises(RolloutError, match=rf"replica 1 is fenced: sync of e1\.s1 .*{QKV}"):
        fleet.ask_server(1, fleet.servers[1])


def test_a_survivor_is_fenced_until_the_repetition_is_committed(make_fleet, monkeypatch):
    """It has loaded and verified the version that the other one failed to commit."""
    fleet, seen = make_fleet(goes_on=True), []
    fleet.publish(0)
    transfer = fleet.sync.transfer

    def looking(order, clock):
        if order.index > 2:
            seen.extend(server.call("committed_version", timeout=LIMIT_S) for server in survivors)
        return transfer(order, clock)

    survivors = fleet.servers[:1]
    monkeypatch.setattr(fleet.sync, "transfer", looking)
    with monkeypatch.context() as harming:
        FAULTS["commit: refused"](fleet, 1, harming)
        fleet.publish(1)
    assert seen == [None]
    assert fleet.servers[0].call("committed_version", timeout=LIMIT_S) == PolicyVersion(1, 1)


def test_a_repetition_is_verified_whatever_is_due(make_fleet, monkeypatch):
    fleet = make_fleet(goes_on=True, verify_every=2)
    for step in range(2):
        fleet.publish(step)
    with monkeypatch.context() as harming:
        flipped(fleet, 1, harming)
        fleet.publish(2)
    fleet.publish(3)
    looked = [(record.sync_index, record.live is not None) for record in fleet.sync.records]
    assert looked == [(1, True), (2, False), (3, True), (4, True), (5, True)]
    assert fleet.sync.records[3].repeats == 3


def test_one_that_cannot_be_fenced_is_stopped(make_fleet, monkeypatch):
    fleet = make_fleet(goes_on=True)
    fleet.publish(0)
    with monkeypatch.context() as harming:
        refuses("fence", "no answer")(fleet, 1, harming)
        refuses("commit", "no answer")(fleet, 1, harming)
        fleet.publish(1)
    with pytest.raises(TransferError, match="ended"):
        fleet.ask_server(1, fleet.servers[1])


def test_what_fails_at_the_trainer_is_no_replicas_fault(make_fleet):
    fleet = make_fleet(goes_on=True)
    fleet.publish(0)
    fleet.actor.failing = True
    with pytest.raises(MiniRLError, match="cannot gather"):
        fleet.publish(1)
    assert fleet.manager.given_up == {}
    for replica, server in enumerate(fleet.servers):
        with pytest.raises(RolloutError, match="fenced"):
            fleet.ask_server(replica, server)


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_whatever_ends_a_sync_leaves_a_record(make_fleet, monkeypatch, kind):
    """Also a defect in the controller, and somebody who ends the run."""
    fleet = make_fleet(goes_on=True)
    fleet.publish(0)

    def broken(*arguments):
        raise kind("in the middle")

    monkeypatch.setattr(fleet.sync.live, "verify", broken)
    with pytest.raises(kind):
        fleet.publish(1)
    record = fleet.sync.records[-1]
    assert (record.version, record.error) == ("e1.s1", f"{kind.__name__}: in the middle")
    assert record.weights_digest is None
    for replica, server in enumerate(fleet.servers):
        with pytest.raises(RolloutError, match=r"fenced|between versions"):
            fleet.ask_server(replica, server)


@pytest.mark.parametrize("kind", [TransferError, TransferTimeoutError])
def test_trouble_with_the_transfer_itself_blames_nobody(make_fleet, monkeypatch, kind):
    """A receiver that only says that a transfer failed does not say that it was its own fault."""
    fleet = make_fleet(goes_on=True)
    fleet.publish(0)
    raises(kind, "the wire was cut", "connect")(fleet, 1, monkeypatch)
    with pytest.raises(kind, match="the wire was cut"):
        fleet.publish(1)
    assert fleet.manager.given_up == {}
    assert fleet.sync.records[-1].given_up == {}


def test_waiting_for_one_that_does_not_connect_is_no_fault(make_fleet, monkeypatch):
    """The others cannot close the transfer before they have given up on it, either."""
    fleet = make_fleet(goes_on=True)
    monkeypatch.setattr(checkpoint_manager, "_CONNECT_S", 2.0)
    raises(TransferTimeoutError, "nobody listens", "connect")(fleet, 1, monkeypatch)
    with pytest.raises(TransferTimeoutError, match="nobody listens"):
        fleet.publish(0)
    assert fleet.manager.given_up == {}


def test_without_a_replica_left_the_run_stops_with_the_cause(make_fleet, monkeypatch):
    fleet = make_fleet(goes_on=True)
    fleet.publish(0)
    flipped(fleet, 0, monkeypatch)
    flipped(fleet, 1, monkeypatch)
    with pytest.raises(DigestMismatchError, match="on replica 1"):
        fleet.publish(1)
    assert [record.replicas for record in fleet.sync.records] == [[0, 1], [0, 1], [1]]
    assert sorted(fleet.manager.given_up) == [0, 1]
    with pytest.raises(RolloutError):
        fleet.ask()


def test_one_that_dies_after_the_commit_is_missed_by_the_next_sync(make_fleet, monkeypatch):
    fleet = make_fleet(goes_on=True)
    fleet.publish(0)
    with monkeypatch.context() as harming:
        dies("finalize")(fleet, 1, harming)
        assert fleet.publish(1).replicas == [0, 1]
    assert fleet.publish(2).replicas == [0]
    assert list(fleet.manager.given_up) == [1]
    assert {str(versions) for versions, _ in fleet.ask()} == {"{'e1.s2'}"}


def test_a_newcomer_that_fails_is_given_up_and_the_others_serve_on(make_fleet, monkeypatch):
    fleet = make_fleet(goes_on=True, late=True)
    fleet.publish(0)
    fleet.come_up()
    with monkeypatch.context() as harming:
        flipped(fleet, 1, harming)
        record = fleet.sync.catch_up(PolicyVersion(1, 0))
    assert (record.phase, list(record.given_up)) == ("joining", [1])
    assert fleet.sync.catch_up(PolicyVersion(1, 0)) is None
    assert {str(versions) for versions, _ in fleet.ask()} == {"{'e1.s0'}"}


def test_a_newcomer_answers_nothing_before_it_was_verified(make_fleet, monkeypatch):
    """Not even whoever asks it directly, when it has loaded all; the others go on meanwhile."""
    fleet = make_fleet(goes_on=True, late=True, verify_every=9)
    fleet.publish(0)
    served = fleet.ask()
    verify, seen = fleet.sync.live.verify, []

    def looked_at(*arguments):
        with pytest.raises(ReplicaFencedError, match="replica 1"):
            fleet.ask_server(1, fleet.servers[1])
        seen.append(fleet.ask())
        return verify(*arguments)

    fleet.come_up()
    monkeypatch.setattr(fleet.sync.live, "verify", looked_at)
    record = fleet.sync.catch_up(PolicyVersion(1, 0))
    assert seen == [served]
    assert (record.phase, record.replicas, record.error) == ("joining", [1], None)
    assert record.live["matched"] > 0
    assert [{str(*versions)} for _, versions, _ in fleet.ask_server(1, fleet.servers[1])] == [
        {"e1.s0"}
    ]


def test_a_newcomer_is_verified_in_whatever_sync_it_takes_part(make_fleet):
    """Here in that of a trained version, which nobody else would be verified in."""
    fleet = make_fleet(goes_on=True, late=True, verify_every=9)
    live = fleet.sync.live
    live._settings = msgspec.structs.replace(live._settings, all_replicas=False)
    for step in range(2):
        fleet.publish(step)
    fleet.come_up()
    for step in range(2, 4):
        fleet.publish(step)
    told = [(record.replicas, len(record.live_reports)) for record in fleet.sync.records]
    assert told == [([0], 1), ([0], 0), ([0, 1], 2), ([0, 1], 0)]


@pytest.mark.parametrize("victim", [0, 1])
def test_requests_of_one_that_dies_are_asked_again_of_the_others(make_fleet, victim):
    fleet = make_fleet(goes_on=True)
    fleet.publish(0)
    before = fleet.ask()
    fleet.servers[victim].kill()
    assert fleet.ask() == before
    assert list(fleet.manager.given_up) == [victim]
    assert fleet.publish(1).replicas == [1 - victim]


def test_unless_told_otherwise_a_death_in_generation_stops_the_run(make_fleet):
    fleet = make_fleet(goes_on=False)
    fleet.publish(0)
    fleet.servers[1].kill()
    with pytest.raises(TransferError):
        fleet.ask()
    assert fleet.manager.given_up == {}


STALL_S = 1.0


def hangs(fleet, victim):
    """It answers whatever costs nothing, and schedules no request."""
    fleet.servers[victim]._object._engine._may_step = lambda: False


@pytest.mark.parametrize("victim", [0, 1])
def test_one_that_makes_no_token_is_given_up(make_fleet, victim):
    fleet = make_fleet(goes_on=True, stall_s=STALL_S)
    fleet.publish(0)
    before = fleet.ask()
    hangs(fleet, victim)
    assert fleet.ask() == before
    assert "no token for 1 s" in fleet.manager.given_up[victim]
    with pytest.raises(RolloutError, match=rf"replica {victim} is fenced: .*no token"):
        fleet.ask_server(victim, fleet.servers[victim])


def test_unless_told_otherwise_one_that_makes_no_token_stops_the_run(make_fleet):
    fleet = make_fleet(goes_on=False, stall_s=STALL_S)
    fleet.publish(0)
    hangs(fleet, 1)
    with pytest.raises(StalledError, match="replica 1: it has made no token for 1 s"):
        fleet.ask()
    assert fleet.manager.given_up == {}


def test_one_that_is_slow_is_waited_for(make_fleet):
    """It takes several times as long as it may be silent."""
    fleet = make_fleet(goes_on=True, stall_s=STALL_S)
    fleet.publish(0)
    engine = fleet.servers[1]._object._engine
    wake = engine._wake

    async def wake_later():
        await asyncio.sleep(0.5 * STALL_S)
        await wake()

    engine._wake = wake_later
    fleet.ask([request("a"), request("b")])
    assert fleet.manager.given_up == {}


def test_with_the_last_one_generation_ends_with_the_cause(make_fleet):
    fleet = make_fleet(goes_on=True)
    fleet.publish(0)
    for server in fleet.servers:
        server.kill()
    with pytest.raises(TransferError, match="ended"):
        fleet.ask()


def test_a_request_that_cannot_be_answered_is_no_replicas_fault(make_fleet):
    fleet = make_fleet(goes_on=True)
    fleet.publish(0)
    impossible = GenerateRequest("x", [], SamplingParams(temperature=0.0, max_tokens=3))
    with pytest.raises(RolloutError, match="prompt of 0 tokens"):
        fleet.ask([request("a"), request("b"), impossible])
    assert fleet.manager.given_up == {}
