"""The streaming engine over a transport within the process: real control plane, no devices."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.channel import connect, new_key
from rl_core.deadlines import CancelToken, Deadline
from rl_core.digests import WSUM64, XXH3_128
from rl_core.errors import (
    ConfigError,
    DigestMismatchError,
    LifecycleError,
    ManifestMismatchError,
    MessageError,
    MiniRLError,
    StaleVersionError,
    TransferError,
    VerificationError,
)
from rl_core.interfaces import TransferRole
from rl_core.metadata import DTYPE_BYTES
from rl_core.testing.loopback_transport import LoopbackEngine
from rl_core.testing.weight_set import WeightSet
from rl_core.torch import as_bytes, dtype_of
from rl_core.transfer import packing
from rl_core.transfer.messages import Join, ToReceiver
from rl_core.versions import PolicyVersion

KEY = new_key()
SECONDS = 20.0


class Ring:
    """A sender and receivers, each call in a thread of its rank."""

    def __init__(
        self, receivers=1, megabytes=1 / 1024, direct=0.25, kind=XXH3_128, run="run", insists=None
    ):
        def role(name, rank, kind=kind):
            return TransferRole(
                name, rank, key=KEY, run_id=run, bucket_megabytes=megabytes, digest_kind=kind
            )

        self.sender = LoopbackEngine(role("sender", 0), direct)
        self.receivers = [
            LoopbackEngine(role("receiver", n, insists or kind), direct) for n in range(receivers)
        ]
        self.threads = ThreadPoolExecutor(1 + receivers)
        self.cancel = CancelToken()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for engine in (self.sender, *self.receivers):
            engine.shutdown()
        self.threads.shutdown()

    def connect(self):
        sender = self.sender.prepare()
        places = LoopbackEngine.build_topology([sender], [r.prepare() for r in self.receivers])
        engines = [(self.sender, places["sender"][0])]
        engines += zip(self.receivers, places["receiver"], strict=True)
        deadline = Deadline.after(SECONDS)
        futures = [
            self.threads.submit(engine.build_process_group, place, deadline)
            for engine, place in engines
        ]
        for future in futures:
            future.result()

    def move(self, stream, manifest, consume=None, expected=None, seconds=SECONDS):
        """What the sender and each receiver ended with: a value or an error."""
        deadline = Deadline.after(seconds)
        futures = [
            self.threads.submit(self.sender.send_weights, stream, manifest, deadline, self.cancel)
        ]
        call = (expected or manifest, deadline, self.cancel, consume)
        futures += [self.threads.submit(_receive, each, *call) for each in self.receivers]
        return [future.exception() or future.result() for future in futures]

    def finalize(self, success):
        for engine in (self.sender, *self.receivers):
            engine.finalize(success)

    def sync(self, weights, version, **kwargs):
        self.connect()
        manifest = weights.manifest(version, "run")
        ends = self.move(_stream(weights), manifest, **kwargs)
        self.finalize(not any(isinstance(end, Exception) for end in ends))
        return ends


def _receive(engine, manifest, deadline, cancel, consume=None):
    got = {}
    for lease in engine.receive_weights(manifest, deadline, cancel):
        with lease as entries:
            for entry in entries:
                if consume is not None:
                    consume(entry)
                got[entry.meta.name] = (entry.tensor.clone(), entry.digest)
    return got


def _stream(weights):
    return iter(list(zip(weights.metas, weights.tensors.values(), strict=True)))


def _assert_equal(weights, got):
    assert list(got) == list(weights.tensors)
    for name, tensor in weights.tensors.items():
        assert got[name][0].dtype == tensor.dtype
        assert got[name][0].shape == tensor.shape
        assert torch.equal(as_bytes(got[name][0]), as_bytes(tensor))


SMALL = WeightSet({"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1.5), "c": torch.ones(9)})
LARGE = WeightSet({f"t{n}": torch.randn(200) for n in range(12)})


@st.composite
def weight_sets(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 12), max_size=3), max_size=8))
    tensors = {}
    for number, shape in enumerate(shapes):
        dtype = dtype_of(draw(st.sampled_from(sorted(DTYPE_BYTES))))
        tensor = torch.randint(0, 2, shape).to(dtype)
        tensors[f"t{number}"] = tensor.t() if tensor.dim() == 2 and draw(st.booleans()) else tensor
    return WeightSet(tensors)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(weight_sets(), min_size=1, max_size=3),
    st.sampled_from([1 / 4096, 1 / 2048, 1 / 1024, 1.0]),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.sampled_from([None, XXH3_128, WSUM64]),
)
def test_weights_arrive_bit_exact(versions, megabytes, direct, kind):
    with Ring(2, megabytes, direct, kind) as ring:
        for step, weights in enumerate(versions):
            report, *received = ring.sync(weights, PolicyVersion(1, step))
            assert not isinstance(report, Exception), report
            for got in received:
                _assert_equal(weights, got)
                assert all((digest is None) == (kind is None) for _, digest in got.values())
            assert report.payload_bytes == sum(meta.nbytes for meta in weights.metas)
            if kind == XXH3_128:
                assert report.weights_digest == weights.weights_digest


@pytest.mark.parametrize("direct", [0.0, 0.25])
def test_digest_of_a_tensor_that_is_copied_comes_before_the_copy(monkeypatch, direct):
    """So that one copy at a time is enough, and damage in the one that is sent is found."""
    digest, copy, calls = packing.content_digest, packing.flat_bytes, []

    def digested(*args):
        calls.append("digest")
        return digest(*args)

    def miscopied(*args):
        calls.append("copy")
        data = copy(*args)
        data[0] ^= 1
        return data

    monkeypatch.setattr(packing, "content_digest", digested)
    monkeypatch.setattr(packing, "flat_bytes", miscopied)
    weights = WeightSet({"transposed": torch.randn(40, 50).T})
    with Ring(direct=direct) as ring:
        _, got = ring.sync(weights, PolicyVersion(1, 0))
    tensor, told = got["transposed"]
    assert calls == ["digest", "copy"]
    assert told == digest(weights.metas[0], weights.tensors["transposed"])
    assert told != digest(weights.metas[0], tensor)


def test_group_is_kept_while_all_goes_well():
    with Ring() as ring:
        ring.sync(SMALL, PolicyVersion(1, 0))
        first = ring.sender.prepare(), ring.receivers[0].prepare()
        ring.sync(SMALL, PolicyVersion(1, 1))
        assert (ring.sender.prepare(), ring.receivers[0].prepare()) == first
        ring.finalize(success=False)
        assert ring.sender.prepare() != first[0]
        assert ring.receivers[0].prepare() != first[1]


@pytest.mark.parametrize("version", [PolicyVersion(1, 5), PolicyVersion(1, 4)])
def test_stale_version_is_refused_on_both_sides(version):
    with Ring() as ring:
        ring.sync(SMALL, PolicyVersion(1, 5))
        for end in ring.sync(SMALL, version):
            assert isinstance(end, StaleVersionError)
            assert str(version) in str(end)
        _assert_equal(SMALL, ring.sync(SMALL, PolicyVersion(1, 6))[1])


def test_manifest_of_the_receiver_differs():
    other = SMALL.without("b").manifest(PolicyVersion(1, 0), "run")
    with Ring() as ring:
        for end in ring.sync(SMALL, PolicyVersion(1, 0), expected=other):
            assert isinstance(end, ManifestMismatchError)


def test_stream_out_of_order_is_named():
    manifest = SMALL.manifest(PolicyVersion(1, 0), "run")
    with Ring() as ring:
        ring.connect()
        for end in ring.move(_stream(SMALL.ordered(["a", "c", "b"])), manifest):
            assert isinstance(end, ManifestMismatchError)
            assert "'c' came out of order" in str(end)


def test_tensor_that_is_not_what_it_says():
    manifest = SMALL.manifest(PolicyVersion(1, 0), "run")
    stream = iter([(meta, torch.zeros(1)) for meta in SMALL.metas])
    with Ring() as ring:
        ring.connect()
        for end in ring.move(stream, manifest):
            assert isinstance(end, ManifestMismatchError)
            assert "'a'" in str(end)


def test_error_of_a_consumer_reaches_everybody():
    def consume(entry):
        if entry.meta.name == "t7":
            raise DigestMismatchError("tensor 't7' differs", ["t7"])

    with Ring(2) as ring:
        for end in ring.sync(LARGE, PolicyVersion(1, 0), consume=consume):
            assert isinstance(end, DigestMismatchError | LifecycleError)
            assert "t7" in str(end)
        _assert_equal(LARGE, ring.sync(LARGE, PolicyVersion(1, 0))[1])


def test_error_of_the_stream_reaches_everybody():
    def stream():
        yield from list(_stream(LARGE))[:5]
        raise ZeroDivisionError("the trainer's own")

    with Ring(2) as ring:
        ring.connect()
        sent, *received = ring.move(stream(), LARGE.manifest(PolicyVersion(1, 0), "run"))
        assert isinstance(sent, ZeroDivisionError)
        for end in received:
            assert isinstance(end, TransferError)
            assert "the trainer's own" in str(end)


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_abort_from_another_thread(who):
    entered, left = threading.Event(), threading.Event()

    def consume(entry):
        entered.set()
        left.wait(SECONDS)

    with Ring() as ring:
        ring.connect()
        manifest = LARGE.manifest(PolicyVersion(1, 0), "run")
        deadline = Deadline.after(SECONDS)
        sending = ring.threads.submit(
            ring.sender.send_weights, _stream(LARGE), manifest, deadline, ring.cancel
        )
        receiving = ring.threads.submit(
            _receive, ring.receivers[0], manifest, deadline, ring.cancel, consume
        )
        assert entered.wait(SECONDS)
        (ring.sender if who == "sender" else ring.receivers[0]).abort("enough")
        if who == "receiver":  # told although its own worker is inside a lease
            assert isinstance(sending.exception(SECONDS), LifecycleError)
        left.set()
        for future in (sending, receiving):
            error = future.exception(SECONDS)
            assert isinstance(error, LifecycleError)
            assert "enough" in str(error)
        ring.finalize(success=False)
        _assert_equal(LARGE, ring.sync(LARGE, PolicyVersion(1, 0))[1])


def test_receiver_that_insists_on_digests():
    with Ring(kind=None, insists=XXH3_128) as ring:
        for end in ring.sync(SMALL, PolicyVersion(1, 0)):
            assert isinstance(end, VerificationError)


def test_engine_of_another_run_cannot_join():
    with Ring() as ring, Ring(run="other") as other:
        sender, receiver = ring.sender.prepare(), other.receivers[0].prepare()
        places = LoopbackEngine.build_topology([sender], [receiver])
        deadline = Deadline.after(1.0)
        building = ring.threads.submit(
            ring.sender.build_process_group, places["sender"][0], deadline
        )
        with pytest.raises(StaleVersionError, match="other"):
            other.receivers[0].build_process_group(places["receiver"][0], deadline)
        assert isinstance(building.exception(), TransferError)


@pytest.mark.parametrize("message", [b"", b"\x80", b"\x93abc", b"\x00" * 40])
def test_peer_that_talks_nonsense_does_not_disturb(message):
    with Ring() as ring:
        address = ring.sender.prepare().address
        intruder = connect_later(ring, address, message)
        _assert_equal(SMALL, ring.sync(SMALL, PolicyVersion(1, 0))[1])
        intruder.join(SECONDS)


def connect_later(ring, address, message):
    def talk():
        try:
            with connect(address, KEY, ToReceiver, Deadline.after(2)) as channel:
                channel._send_all(message, Deadline.after(2))
                channel.send(Join(99, "run", 1, "no group"), Deadline.after(2))
        except MiniRLError:
            return

    thread = threading.Thread(target=talk)
    thread.start()
    return thread


def test_wrong_order_of_calls():
    manifest = SMALL.manifest(PolicyVersion(1, 0), "run")
    with Ring() as ring:
        deadline = Deadline.after(1)
        stream = _stream(SMALL)
        with pytest.raises(LifecycleError, match="prepare first"):
            ring.sender.send_weights(stream, manifest, deadline, ring.cancel)
        assert next(stream, None) is None
        ring.connect()
        with pytest.raises(LifecycleError, match="not for a sender"):
            ring.sender.receive_weights(manifest, deadline, ring.cancel)
        ring.finalize(success=True)
        ring.finalize(success=True)
    with pytest.raises(LifecycleError, match="shut down"):
        ring.sender.prepare()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"host": "0.0.0.0"}, "every interface"),
        ({"key": b"short"}, "at least 16 bytes"),
        ({"role": "spectator"}, "spectator"),
    ],
)
def test_role_that_cannot_work(changes, text):
    values = {"role": "sender", "rank": 0, "key": KEY, **changes}
    with pytest.raises(ConfigError, match=text):
        LoopbackEngine(TransferRole(**values))


def test_wrong_key_is_refused():
    with Ring() as ring:
        address = ring.sender.prepare().address
        building = ring.threads.submit(
            ring.sender.build_process_group,
            LoopbackEngine.build_topology([ring.sender.prepare()], [ring.receivers[0].prepare()])[
                "sender"
            ][0],
            Deadline.after(1),
        )
        with pytest.raises(MessageError):
            connect(address, new_key(), ToReceiver, Deadline.after(5))
        assert isinstance(building.exception(), TransferError)


def test_cancel_is_seen_where_nothing_is_waited_for():
    with Ring() as ring:

        def stream():
            for number, item in enumerate(_stream(LARGE)):
                if number == len(LARGE.metas) - 1:
                    ring.cancel.cancel("at the last tensor")
                yield item

        ring.connect()
        for end in ring.move(stream(), LARGE.manifest(PolicyVersion(1, 0), "run")):
            assert isinstance(end, LifecycleError)
            assert "at the last tensor" in str(end)
