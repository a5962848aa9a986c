"""Replicas that come up at different times, with the reference engine in threads."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import msgspec
import pytest
import torch

from minirl.live_member import Expected
from minirl.live_verification import LiveSettings, LiveVerification
from minirl.resource_pool import Bundle, ResourcePool
from minirl.rollout_manager import RolloutManager
from minirl.sync_record import Moved
from minirl.sync_settings import SyncSettings
from minirl.weight_sync import WeightSync
from rl_core import plugins
from rl_core.deadlines import Deadline
from rl_core.errors import (
    DigestMismatchError,
    LifecycleError,
    ManifestMismatchError,
    ReplicaFencedError,
    TransferError,
    VerificationError,
)
from rl_core.interfaces import RolloutMode
from rl_core.rollout.expected_digests import expected_digests
from rl_core.testing.reference_adapter import ReferenceAdapter
from rl_core.testing.reference_config import ReferenceConfig
from rl_core.testing.reference_layout import layout_spec
from rl_core.testing.reference_replica import REFERENCE_BACKEND
from rl_core.testing.reference_weights import make_weights
from rl_core.testing.thread_launcher import ThreadHandle, ThreadLauncher
from rl_core.testing.weight_set import leases
from rl_core.trajectory import GenerateRequest, SamplingParams
from rl_core.versions import PolicyVersion, VersionStore

LIMIT_S = 20.0
CONFIG = ReferenceConfig()
VERSIONS = [PolicyVersion(1, step) for step in range(4)]


class DirectSync(WeightSync):
    """Hands `weights` to the adapters, without anything in between."""

    weights = make_weights(CONFIG.model, 1)
    harm = staticmethod(lambda entries: entries)

    def release(self):
        pass

    def transfer(self, order, clock):
        manifest = self.weights.manifest(order.version)
        entries = self.harm(self.weights.entries())
        reports = []
        for rank in self.rollout.receiving:
            _, _, server, tp_rank = self.rollout.adapter_arguments(rank)
            adapter = ReferenceAdapter(server, tp_rank, CONFIG)
            stream = leases(entries, 3)
            reports.append(adapter.update_weights(stream, manifest, Deadline.after(LIMIT_S)))
        return Moved(reports, [self.expected(manifest)] if order.live else [])

    def close(self, clock, *, success):
        pass

    def expected(self, manifest):
        stream = zip(self.weights.metas, self.weights.tensors.values(), strict=True)
        spec = layout_spec(CONFIG.model)
        return Expected(tuple(expected_digests(stream, manifest, spec, [0], 1)))


class Fleet:
    """Two replicas of which the second comes up when `gate` is set."""

    def __init__(self, versions):
        self.manager = RolloutManager(
            "reference", {"tensor_model_parallel_size": 1}, ThreadLauncher()
        )
        pool = ResourcePool("rollout", 2, "cpu")
        pool.bundles = [Bundle(rank, "node", "127.0.0.1", rank) for rank in range(2)]
        self.manager.create(pool, 2, RolloutMode.STANDALONE)
        self.sent = []
        self.gate = threading.Event()
        self.cause = None
        held, start = self.manager._replicas[1], self.manager._replicas[1].start

        def start_held(deadline):
            self.gate.wait(LIMIT_S)
            if self.cause is not None:
                raise self.cause
            start(deadline)

        held.start = start_held
        settings = SyncSettings("run", "separate", "direct", LIMIT_S, False, True)
        self.sync = DirectSync(self.manager, versions, settings)

    def come_up(self):
        """Let the second replica start, and wait until it has."""
        self.gate.set()
        self.manager._starts[1].outcome.result(LIMIT_S)

    def ask(self):
        """Who answered four requests, with which version: a set of pairs."""
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        requests = [GenerateRequest(str(n), [3, 5, n + 1], sampling) for n in range(4)]
        self.sent.clear()
        completions = self.manager.generate(requests)
        assert [completion.request_id for completion in completions] == list("0123")
        versions = [span.version for item in completions for span in item.version_spans]
        numbers = {replica._server: rank for rank, replica in enumerate(self.manager._replicas)}
        share = len(versions) // len(self.sent)
        return {(numbers[self.sent[i // share]], version) for i, version in enumerate(versions)}


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    monkeypatch.setattr(plugins, "load_configured", lambda *_: (REFERENCE_BACKEND, CONFIG))
    made = Fleet(VersionStore(tmp_path / "version.json"))
    submit = ThreadHandle.submit

    def noting(handle, method, *args, **kwargs):
        if method == "generate":
            made.sent.append(handle)
        return submit(handle, method, *args, **kwargs)

    monkeypatch.setattr(ThreadHandle, "submit", noting)
    yield made
    made.cause = LifecycleError("the test is over")
    made.gate.set()
    made.manager.shutdown(LIMIT_S)


def test_all_replicas_are_waited_for_unless_told_otherwise(fleet, caplog):
    caplog.set_level("INFO")
    with ThreadPoolExecutor(1) as threads:
        start = threads.submit(fleet.manager.start, LIMIT_S)
        assert not wait([start], 0.3).done
        fleet.gate.set()
        start.result(LIMIT_S)
    fleet.sync.sync(VERSIONS[0], "initial")
    assert fleet.ask() == {(0, VERSIONS[0]), (1, VERSIONS[0])}
    assert fleet.sync.catch_up(VERSIONS[0]) is None
    assert "replicas=2" in caplog.text
    assert "starting" not in caplog.text
    assert "joined" not in caplog.text


def test_a_late_replica_catches_up_with_the_version_served(fleet, caplog):
    caplog.set_level("INFO")
    fleet.manager.start(LIMIT_S, 1)
    with pytest.raises(ReplicaFencedError, match="sync"):
        fleet.ask()
    fleet.sync.sync(VERSIONS[0], "initial")
    assert fleet.sync.catch_up(VERSIONS[0]) is None
    assert fleet.ask() == {(0, VERSIONS[0])}
    fleet.come_up()
    assert fleet.ask() == {(0, VERSIONS[0])}, "a replica without weights was asked"
    assert fleet.sync.catch_up(VERSIONS[0]).replicas == [1]
    assert fleet.ask() == {(0, VERSIONS[0]), (1, VERSIONS[0])}
    fleet.sync.sync(VERSIONS[1], "trained")
    assert fleet.ask() == {(0, VERSIONS[1]), (1, VERSIONS[1])}
    phases = [(record.phase, record.version, record.replicas) for record in fleet.sync.records]
    assert phases == [
        ("initial", "e1.s0", [0]),
        ("joining", "e1.s0", [1]),
        ("trained", "e1.s1", [0, 1]),
    ]
    assert "replicas=1, tp_size=1" in caplog.text
    assert "starting=[1]" in caplog.text
    assert caplog.text.count("Rollout replica joined: replica=1") == 1


def test_a_late_replica_is_verified_before_its_first_request(fleet, tmp_path):
    """Whatever is due: every ninth sync of the first replica is all that was asked for."""
    settings = LiveSettings(
        spec=layout_spec(CONFIG.model),
        source="direct",
        every=9,
        all_replicas=False,
        strict=False,
        root_dir=str(tmp_path),
        keep_last=1,
        timeout_s=LIMIT_S,
        run_id="run",
    )
    fleet.sync.live = LiveVerification(settings, fleet.manager, None)
    fleet.manager.start(LIMIT_S, 1)
    initial = fleet.sync.sync(VERSIONS[0], "initial")
    assert fleet.sync.sync(VERSIONS[1], "trained").live is None
    fleet.come_up()
    joined = fleet.sync.catch_up(VERSIONS[1])
    assert joined.live == initial.live
    assert joined.live["matched"] > 0
    [path] = joined.live_reports
    assert "reference_direct_replica1_rollout1_" in path


def test_a_late_replica_joins_at_the_next_publish(fleet):
    fleet.manager.start(LIMIT_S, 1)
    fleet.sync.sync(VERSIONS[0], "initial")
    fleet.come_up()
    record = fleet.sync.sync(VERSIONS[2], "trained")
    assert record.replicas == [0, 1]
    assert fleet.ask() == {(0, VERSIONS[2]), (1, VERSIONS[2])}


def test_what_a_newcomer_gets_is_what_was_published(fleet):
    """An actor that was trained since must not pass for the version served."""
    fleet.manager.start(LIMIT_S, 1)
    fleet.sync.sync(VERSIONS[0], "initial")
    fleet.come_up()
    fleet.sync.weights = make_weights(CONFIG.model, 2)
    with pytest.raises(VerificationError, match=r"e1\.s0"):
        fleet.sync.catch_up(VERSIONS[0])
    with pytest.raises(ReplicaFencedError, match=r"replica 0.*e1\.s0"):
        fleet.ask()
    fleet.sync.sync(VERSIONS[1], "trained")
    assert fleet.ask() == {(0, VERSIONS[1]), (1, VERSIONS[1])}


def fail(entries):
    raise TransferError("the wire was cut")


def flipped(entries):
    tensor = entries[2].tensor.clone()
    tensor.view(-1).view(torch.uint8)[0] ^= 1
    return [*entries[:2], replace(entries[2], tensor=tensor), *entries[3:]]


def undigested(entries):
    return [replace(entries[0], digest=None), *entries[1:]]


HARMS = {
    "a flipped byte": (flipped, DigestMismatchError, {"mismatched": 1}),
    "a missing tensor": (lambda all_: all_[:-1], ManifestMismatchError, {"missing": 1}),
    "a repeated one": (lambda all_: [*all_, all_[0]], ManifestMismatchError, {"unexpected": 1}),
    "one without digest": (undigested, VerificationError, {"unverifiable": 1}),
    "a cut wire": (fail, TransferError, {}),
}
"""What happens to the tensors, the error that must come of it, and what the record must count."""


@pytest.mark.parametrize("harm", HARMS)
def test_a_failed_sync_leaves_a_record_and_publishes_nothing(fleet, harm):
    fleet.manager.start(LIMIT_S, 1)
    sync, (damage, kind, found) = fleet.sync, HARMS[harm]
    first = sync.sync(VERSIONS[0], "initial")
    sync.harm = damage
    with pytest.raises(kind) as caught:
        sync.sync(VERSIONS[1], "trained")
    failed = sync.records[-1]
    assert failed.error == f"{kind.__name__}: {caught.value}"
    assert (failed.version, failed.phase, failed.replicas) == ("e1.s1", "trained", [0])
    assert {name: n for name, n in failed.light.items() if n and name != "matched"} == found
    assert failed.weights_digest is None
    assert sync.digest_of(VERSIONS[1]) is None
    assert sync.digest_of(VERSIONS[0]) == first.weights_digest

    sync.harm = DirectSync.harm
    repaired = sync.sync(VERSIONS[2], "trained")
    assert repaired.light == {**dict.fromkeys(failed.light, 0), "matched": len(sync.weights.metas)}
    assert [record.sync_index for record in sync.records] == [1, 2, 3]
    assert [record.error is None for record in sync.records] == [True, False, True]
    assert sync.digest_of(VERSIONS[2]) == first.weights_digest


def test_an_interrupted_sync_does_not_pass_for_one_that_published(fleet):
    def interrupt(entries):
        raise KeyboardInterrupt

    fleet.manager.start(LIMIT_S, 1)
    fleet.sync.harm = interrupt
    with pytest.raises(KeyboardInterrupt):
        fleet.sync.sync(VERSIONS[0], "initial")
    [record] = fleet.sync.records
    assert (record.error, record.weights_digest) == ("KeyboardInterrupt: ", None)
    assert fleet.sync.digest_of(VERSIONS[0]) is None


def test_an_adapter_that_reports_a_difference_is_not_believed_to_have_loaded(fleet, monkeypatch):
    """What it counts decides, also where it raises nothing."""
    fleet.manager.start(LIMIT_S, 1)
    load = ReferenceAdapter.update_weights

    def careless(*arguments):
        report = load(*arguments)
        return msgspec.structs.replace(report, matched=report.matched - 1, mismatched=1)

    monkeypatch.setattr(ReferenceAdapter, "update_weights", careless)
    with pytest.raises(VerificationError, match="mismatched=1"):
        fleet.sync.sync(VERSIONS[0], "initial")
    assert fleet.sync.records[0].light["mismatched"] == 1
    with pytest.raises(ReplicaFencedError):
        fleet.ask()


def test_a_replica_that_fails_to_start_is_not_done_without(fleet):
    fleet.manager.start(LIMIT_S, 1)
    fleet.sync.sync(VERSIONS[0], "initial")
    fleet.cause = LifecycleError("replica 1 has no memory")
    with pytest.raises(LifecycleError, match="no memory"):
        fleet.come_up()
    for call in (fleet.ask, lambda: fleet.sync.sync(VERSIONS[1], "trained")):
        with pytest.raises(LifecycleError, match="no memory"):
            call()


def test_one_that_fails_before_enough_are_up_ends_the_start(fleet):
    fleet.cause = LifecycleError("replica 1 has no memory")
    fleet.gate.set()
    with pytest.raises(LifecycleError, match="no memory"):
        fleet.manager.start(LIMIT_S)


def test_a_start_that_hangs_ends_at_its_deadline(fleet):
    fleet.manager.start(LIMIT_S, 1)
    fleet.sync.sync(VERSIONS[0], "initial")
    fleet.manager._starts[1]._overdue = Deadline.after(0)
    with pytest.raises(LifecycleError, match=r"replica 1: .*deadline"):
        fleet.sync.catch_up(VERSIONS[0])
