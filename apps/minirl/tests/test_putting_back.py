"""A publish that fails where nobody can be blamed: the version before is served again, or none."""

import re
from types import SimpleNamespace

import pytest
import two_replicas
from two_replicas import Fleet

from minirl.config import load_config
from minirl.sync_record import RESTORED, SyncRecord
from minirl.trainer import Trainer
from rl_core.errors import MiniRLError, RolloutError, TransferTimeoutError
from rl_core.versions import PolicyVersion


@pytest.fixture
def make_fleet(monkeypatch, tmp_path):
    two_replicas.patch(monkeypatch)
    made = []

    def make(**options):
        made.append(Fleet(tmp_path, goes_on=True, **options))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()


def times_out_while_connecting(fleet, monkeypatch):
    def reach(point):
        if point == "connect":
            raise TransferTimeoutError("the deadline passed")

    monkeypatch.setattr(fleet.receivers[1], "reach", reach)


def trainer_fails_midway(fleet, monkeypatch):
    monkeypatch.setattr(fleet.actor, "failing", True)


def times_out_after_the_load(fleet, monkeypatch):
    """Both replicas hold all of the new version, and the disk two versions."""
    verify = fleet.sync.live.verify

    def late(record, moved, version):
        if record.phase != RESTORED:
            raise TransferTimeoutError("the deadline passed")
        return verify(record, moved, version)

    monkeypatch.setattr(fleet.sync.live, "verify", late)


FAULTS = [times_out_while_connecting, trainer_fails_midway, times_out_after_the_load]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_version_before_is_put_back_verified_and_the_next_one_follows(
    make_fleet, monkeypatch, caplog, fault
):
    fleet = make_fleet(on_disk=True)
    initial = fleet.publish(0)
    served = fleet.ask()
    with monkeypatch.context() as harming:
        fault(fleet, harming)
        fleet.watch()
        failed = fleet.publish(1)
        fleet.stop_watching()
    assert (failed.version, failed.given_up) == ("e1.s1", {})
    assert failed.error is not None
    assert failed.weights_digest is None

    restored = fleet.sync.records[-1]
    assert (restored.phase, restored.version, restored.error) == ("restored", "e1.s0", None)
    assert (restored.replicas, restored.repeats) == ([0, 1], initial.sync_index)
    assert restored.weights_digest == initial.weights_digest
    assert restored.light == initial.light
    assert restored.live == initial.live
    assert fleet.manager.given_up == {}
    assert fleet.ask() == served
    # Nobody was answered by what was not committed.
    assert {version for _, versions, _ in fleet.answers for version in versions} <= {"e1.s0"}
    assert "the version before is served again: failed=e1.s1, served=e1.s0" in caplog.text

    assert fleet.publish(2).error is None
    assert {str(*versions) for versions, _ in fleet.ask()} == {"e1.s2"}


def test_twice_in_a_row_ends_the_run(make_fleet, monkeypatch):
    fleet = make_fleet(on_disk=True)
    fleet.publish(0)
    trainer_fails_midway(fleet, monkeypatch)
    fleet.publish(1)
    with pytest.raises(MiniRLError, match="cannot gather"):
        fleet.publish(2)
    assert_fenced(fleet)


def damaged(fleet, monkeypatch):
    [shard] = (fleet.exchange / "run" / "e1.s0").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def gone(fleet, monkeypatch):
    (fleet.exchange / "run" / "e1.s0" / "READY").unlink()


def held_otherwise(fleet, monkeypatch):
    """Live verification finds a bit that changed after the load."""
    report = fleet.receivers[1].report

    def flip(loaded):
        fleet.servers[1].call("flip", 0, two_replicas.QKV, 0.5, timeout=20)
        return report(loaded)

    monkeypatch.setattr(
        fleet.receivers[1],
        "reload_weights",
        lambda *arguments: flip(
            type(fleet.receivers[1]).reload_weights(fleet.receivers[1], *arguments)
        ),
    )


def not_verified_before(fleet, monkeypatch):
    fleet.sync._expected = ()


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (damaged, "DigestMismatchError|was published with"),
        (gone, r"no directory of version e1\.s0 is kept"),
        (held_otherwise, two_replicas.QKV),
        (not_verified_before, "was not verified live"),
    ],
)
def test_what_cannot_be_put_back_verified_leaves_them_fenced(
    make_fleet, monkeypatch, caplog, harm, why
):
    fleet = make_fleet(on_disk=True)
    fleet.publish(0)
    harm(fleet, monkeypatch)
    trainer_fails_midway(fleet, monkeypatch)
    with pytest.raises(MiniRLError, match="cannot gather"):
        fleet.publish(1)
    assert_fenced(fleet)
    record = fleet.sync.records[-1]
    assert record.phase == RESTORED
    assert re.search(why, record.error), record.error
    assert "e1.s0 cannot be put back: " in caplog.text


def test_where_nothing_is_kept_they_stay_fenced(make_fleet, monkeypatch, caplog):
    fleet = make_fleet()
    fleet.publish(0)
    trainer_fails_midway(fleet, monkeypatch)
    with pytest.raises(MiniRLError, match="cannot gather"):
        fleet.publish(1)
    assert_fenced(fleet)
    assert "e1.s0 cannot be put back: LoopbackEngine keeps no version" in caplog.text


def assert_fenced(fleet):
    for replica, server in enumerate(fleet.servers):
        with pytest.raises(RolloutError, match=f"replica {replica} is fenced: "):
            fleet.ask_server(replica, server)


@pytest.mark.parametrize(("error", "served"), [(None, "e1.s3"), ("it failed", "e1.s0")])
def test_the_loop_goes_on_with_the_version_that_is_served(tmp_path, error, served):
    """What its samples are said to come from, and what late replicas are brought to."""
    record = SyncRecord(2, "trained", "e1.s3", "disk", error=error)
    sync = SimpleNamespace(version_of=PolicyVersion, sync=lambda version, phase: record)
    workers = SimpleNamespace(world_size=1)
    system = SimpleNamespace(weight_sync=sync, workers=workers)
    output = SimpleNamespace(path=tmp_path)
    data = SimpleNamespace(model_path=None)
    trainer = Trainer(load_config([]), data, output, system)
    trainer._publish(3)
    assert str(trainer._version) == served
    assert trainer._published_step == (0 if error else 3)
