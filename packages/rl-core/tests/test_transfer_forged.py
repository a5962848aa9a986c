"""Members that hold the key but do not keep to the protocol: never a hang, a crash or a success."""

import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.buckets import Slot
from rl_core.channel import Listener, new_key
from rl_core.deadlines import CancelToken, Deadline
from rl_core.digests import XXH3_128
from rl_core.errors import MessageError, MiniRLError
from rl_core.interfaces import Endpoint, TransferRole
from rl_core.metadata import Manifest, TensorMeta, Trailer
from rl_core.remote_errors import RemoteError
from rl_core.testing.loopback_transport import LoopbackEngine
from rl_core.testing.weight_set import WeightSet
from rl_core.transfer import messages
from rl_core.transfer.groups import group_name
from rl_core.transfer.link import Link
from rl_core.transfer.messages import PROTOCOL, Join, Joined, ToReceiver, ToSender
from rl_core.transfer.reception import check_begin
from rl_core.transfer.watch import Watch
from rl_core.versions import PolicyVersion

torch = pytest.importorskip("torch")

KEY = new_key()
WEIGHTS = WeightSet({"a": torch.arange(300.0), "b": torch.ones(7), "c": torch.zeros(0)})
MANIFEST = WEIGHTS.manifest(PolicyVersion(1, 3), "run")
SECONDS = 10.0

small = st.integers(-3, 5)
text = st.sampled_from(["a", "b", "run", "", "xxh3-128", "xxh3-128:00", "DigestMismatchError"])
properties = st.dictionaries(text, text, max_size=2)
slots = st.builds(Slot, small, st.sampled_from([0, 16, 1 << 40]), small, small)
entries = st.lists(st.builds(messages.BucketEntry, text, slots, st.none() | text), max_size=3).map(
    tuple
)
manifests = st.just(MANIFEST) | st.just(
    Manifest(PolicyVersion(1, 3), (TensorMeta("a", (300,), "float32"),), "run")
)
hashes = st.sampled_from([MANIFEST.structure_hash, "", "0"])
seconds = st.sampled_from([0.5, -1.0, float("nan")])
begins = st.builds(
    messages.Begin,
    manifests,
    hashes,
    st.sampled_from([0, -16, 15, 16, 1024, 1248, 1 << 60]),
    st.sampled_from([-1, 0, 256]),
    st.sampled_from([None, XXH3_128, "md5"]),
    seconds,
    properties,
)
failures = st.builds(messages.Failed, st.builds(RemoteError, text, text, st.just(("a",))))
to_receiver = st.one_of(
    st.builds(Joined, properties),
    begins,
    st.builds(messages.Go, properties),
    st.builds(messages.BucketReady, small, entries),
    st.builds(messages.End, st.builds(Trailer, st.just(MANIFEST.version), small, small, text)),
    st.builds(messages.Complete),
    failures,
)
to_sender = st.one_of(
    st.builds(Join, small, text, small, text),
    st.builds(messages.Ready, properties),
    st.builds(messages.Ack, small),
    st.builds(messages.Done),
    failures,
)


def role(name):
    return TransferRole(name, 0, key=KEY, run_id="run", bucket_megabytes=1 / 1024)


@given(st.binary(max_size=200), st.sampled_from([ToReceiver, ToSender]))
def test_decoding_never_does_anything_else_than_fail(data, kind):
    try:
        message = msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError:
        return
    assert isinstance(message, msgspec.Struct)


@pytest.mark.parametrize("size", [0, -16, 17, 1 << 20, 1 << 50])
def test_buckets_that_nobody_can_plan_for_are_refused(size):
    """Of a payload of 2 TiB, only by its names: none, not aligned, millions, more than there is."""
    large = Manifest(PolicyVersion(1, 3), (TensorMeta("a", (1 << 39,), "float32"),), "run")
    begin = messages.Begin(large, large.structure_hash, size, 0, None, 1.0)
    with pytest.raises(MessageError, match=f"a bucket of {size} bytes makes no sense"):
        check_begin(begin, large, None)
    check_begin(msgspec.structs.replace(begin, bucket_bytes=1 << 28), large, None)


@settings(max_examples=40, deadline=None)
@given(st.lists(to_sender, max_size=4))
def test_sender_is_not_fooled(said):
    sender = LoopbackEngine(role("sender"))
    endpoints = (sender.prepare(), Endpoint("receiver", 0, ""))
    place = LoopbackEngine.build_topology(endpoints[:1], endpoints[1:])["sender"][0]
    watch = Watch(Deadline.after(SECONDS))

    def play():
        join = Join(PROTOCOL, "run", 1, group_name("run", place))
        link = Link.join(endpoints[0].address, KEY, join, watch)
        try:
            link.expect(Joined, watch)
            for message in said:
                link.tell(message, watch)
        except MiniRLError:
            pass
        finally:
            link.close()

    player = threading.Thread(target=play)
    player.start()
    sender.build_process_group(place, watch.deadline)
    stream = iter(list(zip(WEIGHTS.metas, WEIGHTS.tensors.values(), strict=True)))
    with pytest.raises(MiniRLError):
        sender.send_weights(stream, MANIFEST, Deadline.after(SECONDS), CancelToken())
    assert next(stream, None) is None
    player.join(SECONDS)
    sender.finalize(success=False)
    sender.shutdown()
    assert not watch.deadline.expired


def take_everything(receiver, place, deadline):
    receiver.build_process_group(place, deadline)
    for lease in receiver.receive_weights(MANIFEST, deadline, CancelToken()):
        with lease as lent:
            assert not lent, "tensors came although no bytes were sent"


@settings(max_examples=40, deadline=None)
@given(st.lists(to_receiver, max_size=5))
def test_receiver_is_not_fooled(said):
    receiver = LoopbackEngine(role("receiver"))
    deadline = Deadline.after(SECONDS)
    with Listener("127.0.0.1") as listener:
        endpoints = [Endpoint("sender", 0, listener.address)], [receiver.prepare()]
        place = LoopbackEngine.build_topology(*endpoints)["receiver"][0]

        def play():
            with listener.accept(KEY, ToSender, deadline) as channel:
                try:
                    channel.receive(deadline)
                    channel.send(Joined({"group": "none"}), deadline)
                    for message in said:
                        channel.send(message, deadline)
                except MiniRLError:
                    return

        player = threading.Thread(target=play)
        player.start()
        with pytest.raises(MiniRLError):
            take_everything(receiver, place, deadline)
        player.join(SECONDS)
    receiver.finalize(success=False)
    receiver.shutdown()
    assert not deadline.expired
