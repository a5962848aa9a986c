"""What the adapter sends is what the worker gets, whatever the tensors and the bucket size."""

import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.channel import Listener, new_key
from rl_core.deadlines import Deadline
from rl_core.errors import (
    ManifestMismatchError,
    MessageError,
    TransferError,
    TransferTimeoutError,
)
from rl_core.interfaces import BucketLease, LeasedTensor
from rl_core.metadata import Manifest, TensorMeta, Trailer
from rl_core.rollout.bucket_receiver import BucketReceiver
from rl_core.rollout.bucket_sender import BucketSender, BufferPool
from rl_core.rollout.protocol import CloseStream, FromSocket, FromWorker, OpenStream
from rl_core.torch import as_bytes, dtype_of, meta_of
from rl_core.versions import PolicyVersion

VERSION = PolicyVersion(1, 1)
LIMIT_S = 20.0

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "uint8", "int64", "float8_e4m3fn"])


def random_tensor(shape, dtype, seed):
    meta = TensorMeta("x", shape, dtype)
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (meta.nbytes,), dtype=torch.uint8, generator=generator)
    return (
        data.view(dtype_of(dtype)).view(shape)
        if meta.nbytes
        else torch.empty(shape, dtype=dtype_of(dtype))
    )


def manifest_of(tensors):
    return Manifest(VERSION, tuple(meta_of(name, tensor) for name, tensor in tensors.items()))


def leases_of(tensors, per_lease=3):
    items = list(tensors.items())
    for start in range(0, len(items), per_lease):
        part = items[start : start + per_lease]
        yield BucketLease([LeasedTensor(meta_of(name, value), value) for name, value in part])


class Exchange:
    """Runs a sender in a thread against a receiver in this one."""

    def __init__(self, send, manifest):
        self.key = new_key()
        self.listener = Listener()
        self.manifest = manifest
        self.sender_error = None
        self._send = send
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            channel = self.listener.accept(self.key, FromWorker, Deadline.after(LIMIT_S))
            with channel:
                self._send(channel)
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.sender_error = error

    def receive(self):
        source = FromSocket(self.listener.address, self.key)
        got = {}
        try:
            with BucketReceiver(source, self.manifest, Deadline.after(LIMIT_S)) as receiver:
                for batch in receiver.batches():
                    for arrival in batch:
                        got[arrival.meta.name] = arrival.tensor.clone()
        finally:
            self._thread.join(LIMIT_S)
            self.listener.close()
        return got


def transfer(tensors, megabytes, manifest=None, announced=None):
    announced = announced or manifest_of(tensors)
    pool = BufferPool(megabytes)

    def send(channel):
        BucketSender(channel, manifest or announced, pool, Deadline.after(LIMIT_S)).send(
            leases_of(tensors)
        )

    exchange = Exchange(send, announced)
    try:
        return exchange.receive(), exchange
    finally:
        pool.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    specs=st.lists(st.tuples(shapes, dtypes), max_size=12),
    nbytes=st.sampled_from([1 << 11, 1 << 12, 1 << 14, 1 << 20]),
    data=st.data(),
)
def test_tensors_arrive_bit_equal_in_any_order_and_bucket_size(specs, nbytes, data):
    tensors = {
        f"t{index}": random_tensor(shape, dtype, index)
        for index, (shape, dtype) in enumerate(specs)
    }
    order = data.draw(st.permutations(list(tensors)))
    sent = {name: tensors[name] for name in order}
    got, exchange = transfer(sent, nbytes / (1 << 20), announced=manifest_of(tensors))
    assert exchange.sender_error is None
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(as_bytes(got[name]), as_bytes(tensor))


def test_a_tensor_larger_than_a_bucket_is_joined():
    tensors = {"small": torch.arange(3), "large": torch.arange(10_000), "last": torch.ones(())}
    got, _ = transfer(tensors, 0.002)
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


def test_a_buffer_is_not_overwritten_before_the_batch_was_left():
    tensors = {f"t{index}": torch.full((500,), float(index)) for index in range(20)}
    manifest = manifest_of(tensors)
    pool = BufferPool(0.002)

    def send(channel):
        BucketSender(channel, manifest, pool, Deadline.after(LIMIT_S)).send(leases_of(tensors))

    exchange = Exchange(send, manifest)
    source = FromSocket(exchange.listener.address, exchange.key)
    with BucketReceiver(source, manifest, Deadline.after(LIMIT_S)) as receiver:
        for batch in receiver.batches():
            threading.Event().wait(0.01)  # time for a sender that does not wait
            for arrival in batch:
                assert torch.equal(arrival.tensor, tensors[arrival.meta.name])


def test_buffers_are_kept_and_never_larger_than_the_payload():
    tensors = {"t": torch.ones(1000)}
    pool = BufferPool(2048)
    first = pool.get(manifest_of(tensors), torch.device("cpu"))
    assert first.nbytes == 4000
    assert len(first.tensors) == 1
    assert pool.get(manifest_of(tensors), torch.device("cpu")) is first
    larger = pool.get(manifest_of({"t": torch.ones(2000)}), torch.device("cpu"))
    assert larger.nbytes == 8000
    pool.close()


def test_an_unknown_tensor_stops_the_sender_and_the_worker():
    tensors = {"layer.weight": torch.ones(3)}
    announced = manifest_of({"layer.weights": torch.ones(3)})
    with pytest.raises(TransferError):
        transfer(tensors, 1, announced=announced)


def test_the_sender_names_the_tensor_that_was_not_announced():
    announced = manifest_of({"layer.weights": torch.ones(3)})
    pool = BufferPool(1)
    sender = BucketSender(None, announced, pool, Deadline.after(LIMIT_S))
    sender._open = lambda device: None
    with pytest.raises(ManifestMismatchError, match=r"'layer.weight'.*nearest.*'layer.weights'"):
        sender.send(leases_of({"layer.weight": torch.ones(3)}))


@pytest.mark.parametrize(
    ("claim", "named"),
    [
        ({"a": torch.ones(3), "b": torch.ones(2)}, "'b'"),
        ({"a": torch.ones(4)}, "'a'"),
        ({"a": torch.ones(3, dtype=torch.bfloat16)}, "'a'"),
        ({"other": torch.ones(3)}, "'a'"),
    ],
)
def test_the_worker_names_the_tensor_that_differs_from_the_manifest(claim, named):
    """Missing, of another shape, of another dtype, unknown: whatever the sender believed."""
    tensors = {"a": torch.ones(3)}
    with pytest.raises(ManifestMismatchError, match=named):
        transfer(tensors, 1, manifest=manifest_of(tensors), announced=manifest_of(claim))


def test_a_short_trailer_is_an_error():
    tensors = {"a": torch.ones(3)}
    manifest = manifest_of(tensors)
    pool = BufferPool(1)

    def send(channel):
        deadline = Deadline.after(LIMIT_S)
        sender = BucketSender(channel, manifest, pool, deadline)
        sender._check.close = lambda: Trailer(VERSION, 2, 24)
        sender.send(leases_of(tensors))

    with pytest.raises(ManifestMismatchError, match=r"\(version, tensors, bytes\)"):
        Exchange(send, manifest).receive()


def test_a_stream_that_breaks_off_is_an_error():
    tensors = {f"t{index}": torch.ones(400) for index in range(8)}
    manifest = manifest_of(tensors)
    pool = BufferPool(0.002)

    def broken():
        yield from list(leases_of(tensors, 1))[:3]
        raise RuntimeError("the trainer died")

    def send(channel):
        BucketSender(channel, manifest, pool, Deadline.after(LIMIT_S)).send(broken())

    exchange = Exchange(send, manifest)
    with pytest.raises(TransferError, match=r"closed|lost"):
        exchange.receive()
    assert "the trainer died" in str(exchange.sender_error)


def test_a_stream_without_opening_is_refused():
    manifest = manifest_of({"a": torch.ones(3)})

    def send(channel):
        channel.send(CloseStream(Trailer(VERSION, 1, 12)), Deadline.after(LIMIT_S))

    with pytest.raises(MessageError, match="OpenStream"):
        Exchange(send, manifest).receive()


def test_a_silent_sender_ends_at_the_deadline():
    manifest = manifest_of({"a": torch.ones(3)})
    done = threading.Event()
    exchange = Exchange(lambda channel: done.wait(LIMIT_S), manifest)
    source = FromSocket(exchange.listener.address, exchange.key)
    with (
        BucketReceiver(source, manifest, Deadline.after(0.3)) as receiver,
        pytest.raises(TransferTimeoutError),
    ):
        list(receiver.batches())
    done.set()


def test_an_opening_without_buffers_is_refused():
    manifest = manifest_of({"a": torch.ones(3)})

    def send(channel):
        channel.send(OpenStream(0, 16, "memfd"), Deadline.after(LIMIT_S))

    with pytest.raises(MessageError, match="buffers"):
        Exchange(send, manifest).receive()
