"""Fused syncs into reference engines in threads, verified after loading."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from minirl import live_verification
from minirl.fused_sync import FusedWeightSync
from minirl.live_comparison import BadTensor
from minirl.live_member import share
from minirl.live_verification import LiveSettings, LiveVerification
from minirl.perturbation import Perturbation
from minirl.resource_pool import Bundle, ResourcePool
from minirl.rollout_manager import RolloutManager
from minirl.sync_settings import SyncSettings
from minirl.workers import FusedActorRolloutWorker
from rl_core import plugins
from rl_core.errors import DigestMismatchError, ReplicaFencedError, VerificationError
from rl_core.interfaces import RolloutMode
from rl_core.layout import LayoutSpec
from rl_core.testing.reference_adapter import ReferenceAdapter
from rl_core.testing.reference_config import ReferenceConfig
from rl_core.testing.reference_layout import layout_spec
from rl_core.testing.reference_model import RankModel
from rl_core.testing.reference_replica import REFERENCE_BACKEND
from rl_core.testing.reference_weights import make_weights
from rl_core.testing.thread_launcher import ThreadLauncher
from rl_core.trajectory import GenerateRequest, SamplingParams
from rl_core.versions import VersionStore

LIMIT_S = 20.0
CONFIG = ReferenceConfig()
SPEC = layout_spec(CONFIG.model)
ACTORS = 2
QKV = "layers.1.qkv"
UNKNOWN = 2
"""Tensors of a reference rank that its layout declares unknown."""


class HeldWeights:
    """What a train engine publishes, without training."""

    def __init__(self, seed):
        self.weights = make_weights(CONFIG.model, seed)
        self.kept = None

    def manifest(self, version, run_id):
        return self.weights.manifest(version, run_id)

    def get_per_tensor_param(self):
        yield from zip(self.weights.metas, self.weights.tensors.values(), strict=True)

    def perturb(self, delta):
        self.kept = self.weights
        changes = {name: tensor + delta for name, tensor in self.weights.tensors.items()}
        self.weights = self.weights.changed(changes)

    def restore(self):
        self.weights = self.kept or self.weights


class Actor(FusedActorRolloutWorker):
    """In this process."""

    def __init__(self):
        self._engine = HeldWeights(1)


class Actors:
    """A worker group in threads."""

    def __init__(self):
        self.ranks = [Actor() for _ in range(ACTORS)]
        self._threads = ThreadPoolExecutor(ACTORS)

    def call(self, method, *args, timeout_s):
        calls = [self._threads.submit(getattr(rank, method), *args) for rank in self.ranks]
        return [call.result(timeout_s) for call in calls]

    def each(self, change):
        for rank in self.ranks:
            change(rank.engine)


class Fleet:
    """Replicas of `tp_size` ranks each, and actors that sync them."""

    def __init__(self, path, tp_size, **changes):
        self.manager = RolloutManager(
            "reference", {"tensor_model_parallel_size": tp_size}, ThreadLauncher()
        )
        pool = ResourcePool("actor", ACTORS, "cpu")
        pool.bundles = [Bundle(rank, "node", "127.0.0.1", rank) for rank in range(ACTORS)]
        self.manager.create(pool, ACTORS, RolloutMode.HYBRID)
        self.manager.start(LIMIT_S)
        self.actors = Actors()
        for rank, actor in enumerate(self.actors.ranks):
            actor.init_rollout(*self.manager.adapter_arguments(rank))
            actor.init_live(SPEC, share(rank, ACTORS, tp_size), tp_size)
        light = SyncSettings("run", "fused", "fused/in-process", LIMIT_S, True, True)
        versions = VersionStore(path / "version.json")
        self.sync = FusedWeightSync(self.actors, self.manager, versions, light)
        given = {"every": 1, "all_replicas": False, "strict": False, "keep_last": 3} | changes
        self.live = LiveSettings(
            SPEC, "tensor", root_dir=str(path), timeout_s=LIMIT_S, run_id="run", **given
        )
        self.sync.live = LiveVerification(self.live, self.manager, self.actors)
        self.step = 0

    def perturb(self, delta=0.001):
        self.sync.perturbation = Perturbation(self.actors, "run", delta, LIMIT_S)

    def publish(self):
        phase = "trained" if self.step else "initial"
        version = self.sync.version_of(1, self.step)
        self.step += 1
        return self.sync.sync(version, phase)

    def ask(self):
        """Versions of the tokens that a few requests get, and the tokens."""
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        requests = [GenerateRequest(str(n), [3, 5, n + 1], sampling) for n in range(4)]
        completions = self.manager.generate(requests)
        spans = {str(span.version) for item in completions for span in item.version_spans}
        return spans, [item.token_ids for item in completions]

    def before_the_check(self, monkeypatch, method, *args):
        """Call something on replica 0 after the load, just before it is looked at; once."""
        look, server = self.manager.live_digests, self.manager._replicas[0].server

        def changed(replica, timeout_s):
            monkeypatch.setattr(self.manager, "live_digests", look)
            server.call(method, *args, timeout=LIMIT_S)
            return look(replica, timeout_s)

        monkeypatch.setattr(self.manager, "live_digests", changed)


@pytest.fixture
def make_fleet(monkeypatch, tmp_path):
    monkeypatch.setattr(plugins, "load_configured", lambda *_: (REFERENCE_BACKEND, CONFIG))
    made = []

    def make(tp_size=1, **changes):
        made.append(Fleet(tmp_path, tp_size, **changes))
        return made[-1]

    yield make
    for fleet in made:
        fleet.manager.shutdown(LIMIT_S)


@pytest.mark.parametrize(("actors", "tp_size"), [(1, 1), (2, 1), (2, 2), (2, 5), (4, 2), (8, 3)])
def test_each_rank_is_some_actors_and_no_actor_has_two_where_one_would_do(actors, tp_size):
    shares = [share(actor, actors, tp_size) for actor in range(actors)]
    assert sorted(rank for mine in shares for rank in mine) == list(range(tp_size))
    assert max(map(len, shares)) == -(-tp_size // actors)


def counts(matched, **others):
    kinds = ("mismatched", "missing", "unexpected", "unverifiable")
    return {"matched": matched, **dict.fromkeys(kinds, 0), **others}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_sync_is_verified_on_every_rank_and_told(make_fleet, caplog, tp_size):
    caplog.set_level("INFO")
    fleet = make_fleet(tp_size)
    records = [fleet.publish() for _ in range(2)]
    tensors = len(fleet.manager.live_digests(0, LIMIT_S)[0]) - UNKNOWN
    for record in records:
        assert record.live == counts(tensors * tp_size, unverifiable=UNKNOWN * tp_size)
        assert record.phases["verify_live"] > 0
        assert record.phases["expect_live"] > 0
        [path] = map(Path, record.live_reports)
        assert path.name.startswith("reference_tensor_replica0_rollout0_")
        ranks = [f"rank_{rank}_live_weight_digests.json" for rank in range(tp_size)]
        assert sorted(file.name for file in path.iterdir()) == [*ranks, "summary.json"]
        told = json.loads((path / ranks[-1]).read_text())
        assert (told["version"], told["tp_rank"]) == (record.version, tp_size - 1)
        assert told["tensors"][QKV]["live"] == told["tensors"][QKV]["expected"]
        assert told["unverifiable"].keys() == {"head_packed", "rotary"}
        assert json.loads((path / "summary.json").read_text())["bad"] == []
        assert f"live_digest_dir={path}, live_digest_summary={{'matched': " in caplog.text
    assert caplog.text.count("verify_live_weights=true") == 2
    assert "Reference strict runtime weight verification started: replica=0, source=tensor" in (
        caplog.text
    )
    assert fleet.ask()[0] == {"e1.s1"}


def test_a_bit_flipped_after_the_load_stops_the_publish_and_is_located(make_fleet, monkeypatch):
    fleet = make_fleet(2)
    fleet.publish()
    fleet.before_the_check(monkeypatch, "flip", 1, QKV, 0.5)
    with pytest.raises(DigestMismatchError) as caught:
        fleet.publish()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for part in ("mismatched=1, missing=0", "on rank 1", QKV, "layers.1.self_attn.q_proj.weight[8"):
        assert part in message
    failed = fleet.sync.records[-1]
    assert failed.live["mismatched"] == 1
    assert failed.light == counts(len(fleet.actors.ranks[0].engine.weights.metas) * 2)
    assert failed.error.startswith("DigestMismatchError: live verification of e1.s1")
    with pytest.raises(ReplicaFencedError):
        fleet.ask()
    [path] = failed.live_reports
    [bad] = json.loads((Path(path) / "summary.json").read_text())["bad"]
    assert (bad["kind"], bad["tp_rank"], bad["name"]) == ("mismatched", 1, QKV)
    assert bad["slices"] == [f"model.layers.1.self_attn.{p}_proj.weight[8:16]" for p in "qkv"]
    assert bad["expected"] != bad["live"]
    # (24, 16) float32: byte 768 of 1535 is in element 192.
    assert bad["first_difference"] == [12, 0]
    assert fleet.publish().error is None
    assert fleet.ask()[0] == {"e1.s2"}


def test_right_bytes_in_the_wrong_place_are_named(make_fleet, monkeypatch):
    """Light verification passes: every tensor is what was sent under its name."""
    fleet = make_fleet(1)
    load = ReferenceAdapter.send

    def swapped(adapter, entries, attempt, deadline):
        names = {
            "model.layers.0.mlp.gate_proj.weight": "model.layers.0.mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.gate_proj.weight",
        }
        changed = [
            replace(entry, meta=renamed(entry.meta, names.get(entry.meta.name)))
            for entry in entries
        ]
        load(adapter, changed, attempt, deadline)

    monkeypatch.setattr(ReferenceAdapter, "send", swapped)
    with pytest.raises(DigestMismatchError, match=r"layers\.0\.gate_up"):
        fleet.publish()
    assert fleet.sync.records[0].light["mismatched"] == 0
    assert fleet.sync.records[0].live["mismatched"] == 1


def renamed(meta, name):
    return msgspec.structs.replace(meta, name=name or meta.name)


def test_a_rank_that_kept_the_previous_version_is_named(make_fleet, monkeypatch):
    fleet = make_fleet(2)
    # Memory that was freed comes back as NaN, which does not get as far as this.
    fleet.sync.settings = msgspec.structs.replace(fleet.sync.settings, free_cache_engine=False)
    fleet.publish()
    fleet.actors.each(lambda engine: engine.__init__(2))
    place = RankModel.place
    monkeypatch.setattr(RankModel, "place", lambda m, *a: None if m.tp_rank else place(m, *a))
    with pytest.raises(DigestMismatchError, match="on rank 1"):
        fleet.publish()
    [path] = fleet.sync.records[-1].live_reports
    bad = json.loads((Path(path) / "summary.json").read_text())["bad"]
    assert {one["tp_rank"] for one in bad} == {1}
    assert QKV in {one["name"] for one in bad}
    assert len(bad) > 3
    assert all(one["first_difference"] is not None for one in bad)


def test_what_differs_is_located_as_far_as_memory_goes(monkeypatch):
    """The first few always: they are named in the error."""
    bad = [BadTensor("mismatched", 0, str(n), shape=(n, 8), dtype="float32") for n in range(1, 7)]
    bad.insert(1, BadTensor("unexpected", 0, "x"))

    def located(limit):
        monkeypatch.setattr(live_verification, "SHOWN_BYTES", limit)
        return "".join(one.name for one in live_verification._located(bad))

    assert located(1 << 10) == "123456"
    assert located(32 * (1 + 2 + 3 + 4)) == "1234"
    assert located(16) == "123"


def test_strict_takes_what_the_table_does_not_cover_for_an_error(make_fleet):
    fleet = make_fleet(1, strict=True)
    with pytest.raises(VerificationError, match=r"unverifiable=2, and is strict; head_packed: "):
        fleet.publish()
    with pytest.raises(ReplicaFencedError):
        fleet.ask()
    assert fleet.sync.records[0].live["unverifiable"] == UNKNOWN


def test_every_second_sync_of_all_replicas(make_fleet, caplog):
    caplog.set_level("INFO")
    fleet = make_fleet(1, every=2, all_replicas=True)
    records = [fleet.publish() for _ in range(4)]
    assert [record.live is not None for record in records] == [True, False, True, False]
    assert [len(record.live_reports) for record in records] == [2, 0, 2, 0]
    names = [Path(path).name for path in records[2].live_reports]
    assert [name.rpartition("_")[0] for name in names] == [
        "reference_tensor_replica0_rollout0",
        "reference_tensor_replica1_rollout1",
    ]
    assert "verify_live_weights=false, configured_verify_live_weights=true" in caplog.text


def test_only_the_last_reports_of_this_run_are_kept(make_fleet, tmp_path):
    reports = tmp_path / "live_weight_digests"
    others = reports / "reference_tensor_replica0_rollout0_1700000000000"
    others.mkdir(parents=True)
    fleet = make_fleet(1, keep_last=2)
    records = [fleet.publish() for _ in range(4)]
    kept = {str(path) for path in reports.iterdir()} - {str(others)}
    assert kept == {path for record in records[2:] for path in record.live_reports}
    assert others.exists()


def test_a_report_that_cannot_be_written_stops_the_publish(make_fleet, tmp_path):
    fleet = make_fleet(1)
    (tmp_path / "live_weight_digests").write_text("")
    with pytest.raises(VerificationError, match="cannot be written"):
        fleet.publish()
    with pytest.raises(ReplicaFencedError):
        fleet.ask()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_perturbed_weights_arrive_are_never_served_and_go_away_again(make_fleet, tp_size, caplog):
    caplog.set_level("INFO")
    fleet = make_fleet(tp_size, every=9)
    fleet.perturb()
    fleet.publish()
    before = fleet.ask()[1]
    fleet.publish()
    assert fleet.ask() == ({"e1.s2"}, before)
    initial, changed, restored = fleet.sync.records
    assert initial.perturbation is None
    told = [(record.phase, record.version, record.error) for record in (changed, restored)]
    assert told == [("perturbed", "e1.s1", None), ("trained", "e1.s2", None)]
    weights = len(list(tensors_of(SPEC))) * tp_size
    assert changed.perturbation == {"delta": 0.001, "differ": weights}
    assert restored.perturbation == {"delta": 0.001, "restored": weights}
    assert changed.weights_digest != restored.weights_digest == initial.weights_digest
    assert changed.live == restored.live
    assert "Perturbation: changed weights arrived" in caplog.text
    assert "Perturbation: undone, the weights are as before" in caplog.text


def tensors_of(spec: LayoutSpec):
    """A row for each run-time parameter of a rank."""
    for row in spec.parameters:
        yield from [row] * (spec.layers if "{layer}" in row.name else 1)


def one_tensor_unchanged(actor):
    perturb = actor.perturb

    def partly(delta):
        perturb(delta)
        same = {QKV_SOURCE: actor.kept.tensors[QKV_SOURCE]}
        actor.weights = actor.weights.changed(
            same | {name: actor.kept.tensors[name] for name in REST}
        )

    actor.perturb = partly


QKV_SOURCE = "model.layers.1.self_attn.q_proj.weight"
REST = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv"]


def rounded(actor):
    actor.restore = lambda: setattr(
        actor,
        "weights",
        actor.kept.changed({QKV_SOURCE: actor.kept.tensors[QKV_SOURCE].bfloat16().float()}),
    )


@pytest.mark.parametrize(
    ("harm", "phase", "said"),
    [
        (
            one_tensor_unchanged,
            "perturbed",
            "1 weights are what they were before: 'layers.1.qkv' .*perturb_delta",
        ),
        (rounded, "trained", "1 weights are not what they were before: 'layers.1.qkv'"),
    ],
)
def test_a_change_that_does_not_show_or_stays_stops_the_run(make_fleet, harm, phase, said):
    fleet = make_fleet(1)
    fleet.perturb()
    fleet.publish()
    fleet.actors.each(harm)
    with pytest.raises(VerificationError, match=said):
        fleet.publish()
    assert fleet.sync.records[-1].phase == phase
    assert fleet.sync.records[-1].error is not None
    with pytest.raises(ReplicaFencedError):
        fleet.ask()


def test_weights_are_restored_also_after_a_failure(make_fleet, monkeypatch):
    fleet = make_fleet(1)
    fleet.perturb()
    fleet.publish()
    before = [rank.engine.weights for rank in fleet.actors.ranks]
    fleet.before_the_check(monkeypatch, "flip", 0, "norm", 0.0)
    with pytest.raises(DigestMismatchError):
        fleet.publish()
    assert fleet.sync.records[-1].phase == "perturbed"
    assert [rank.engine.weights for rank in fleet.actors.ranks] == before
