"""A peer's last words count before its going away."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from rl_core.channel import Listener, connect, new_key
from rl_core.deadlines import CancelToken, Deadline
from rl_core.errors import (
    DigestMismatchError,
    LifecycleError,
    PeerLostError,
    TransferError,
    TransferTimeoutError,
    VerificationError,
)
from rl_core.remote_errors import from_wire, to_wire
from rl_core.transfer import control
from rl_core.transfer.control import ControlEnd
from rl_core.transfer.link import Link
from rl_core.transfer.messages import Ack, Failed, Joined, ToReceiver, ToSender
from rl_core.transfer.peers import Peers
from rl_core.transfer.watch import Watch

KEY = new_key()


@pytest.fixture
def watch():
    return Watch(Deadline.after(10), (CancelToken(),))


@contextmanager
def connected():
    """(sender's end, receiver's channel) of one connection."""
    deadline = Deadline.after(10)
    with Listener() as listener, ThreadPoolExecutor(1) as threads:
        other = threads.submit(connect, listener.address, KEY, ToReceiver, deadline)
        mine = ControlEnd(listener.accept(KEY, ToSender, deadline), "receiver 0")
        channel = other.result(10)
    yield mine, channel
    mine.close()
    channel.close()


@pytest.fixture
def ends():
    """Of a connection for the test."""
    with connected() as both:
        yield both


def sender_of(end):
    peers = Peers()
    peers._ends = {1: end}
    peers.begin()
    return peers


def test_what_was_said_before_going_away_is_heard(ends, watch):
    mine, channel = ends
    channel.send(Ack(0), watch.deadline)
    channel.send(Ack(1), watch.deadline)
    channel.close()
    peers = sender_of(mine)
    peers.await_ack(1, watch)
    with pytest.raises(PeerLostError, match="receiver 0 went away"):
        peers.await_ack(2, watch)


def test_a_wait_that_needs_the_peer_ends_at_once(ends, watch):
    mine, channel = ends
    channel.send(Ack(0), watch.deadline)
    channel.close()
    with pytest.raises(PeerLostError, match="receiver 0 went away"):
        sender_of(mine).pump(watch)


def test_a_reported_failure_comes_before_the_loss(ends, watch):
    mine, channel = ends
    channel.send(Failed(to_wire(VerificationError("a tensor differs"))), watch.deadline)
    channel.close()
    with pytest.raises(VerificationError, match="a tensor differs"):
        Link(mine).expect(Ack, watch)
    with pytest.raises(PeerLostError, match="receiver 0 went away"):
        Link(mine).expect(Ack, watch)


def test_a_broken_connection_names_whose_it_was(ends, watch):
    mine, channel = ends
    channel.close()
    with pytest.raises(PeerLostError) as caught:
        sender_of(mine).pump(watch)
    assert caught.value.origin == "receiver 0"
    # Others hear of it from the sender, which is not to blame.
    assert from_wire(to_wire(caught.value, "sender 0")).origin == "receiver 0"


@pytest.mark.parametrize(
    ("error", "origin"),
    [
        (VerificationError("a tensor differs"), "receiver 1"),
        (DigestMismatchError("a tensor differs", ["a"]), "receiver 1"),
        (ValueError("of a library"), "receiver 1"),
        (DigestMismatchError("a tensor differs", ["a"]).blaming("receiver 0"), "receiver 0"),
        (TransferError("the wire was cut"), ""),
        (TransferTimeoutError("nothing came"), ""),
        (TransferError("the engine is gone").blaming("receiver 0"), "receiver 0"),
    ],
)
def test_who_failed_is_told_unless_it_may_have_been_the_other(error, origin):
    told = from_wire(to_wire(error, "receiver 1"))
    assert told.origin == origin
    assert pickle.loads(pickle.dumps(told)).origin == origin


def test_a_peer_that_is_gone_does_not_wake_its_listener_for_ever(ends, watch):
    mine, channel = ends
    channel.close()
    mine.read(watch.deadline)
    assert mine.fileno() == -1


def test_who_reads_nothing_holds_up_no_report(ends, watch, monkeypatch):
    monkeypatch.setattr(control, "FAREWELL_S", 20.0)
    heard, channel = ends
    with connected() as (stuck, _), ThreadPoolExecutor(1) as threads:
        peers = Peers()
        peers._ends = {1: stuck, 2: heard}
        with stuck._sending:  # as while its peer reads nothing
            reporting = threads.submit(peers.report, VerificationError("a tensor differs"), "here")
            with pytest.raises(VerificationError, match="a tensor differs"):
                Link(ControlEnd(channel, "sender")).expect(Ack, watch)
        reporting.result(10)


LONG = Joined({"much": "x" * (8 << 20)})
"""More than a connection holds that nobody reads from."""


def test_sending_to_one_that_does_not_read_can_be_cancelled(ends, watch):
    token = CancelToken()
    token.cancel("enough")
    with pytest.raises(LifecycleError, match="enough"):
        ends[0].send(LONG, watch.also(token))


def test_while_one_does_not_read_the_others_are_heard(ends, watch):
    with connected() as (stuck, _):
        peers = Peers()
        peers._ends = {1: stuck, 2: ends[0]}
        ends[1].send(Failed(to_wire(VerificationError("a tensor differs"))), watch.deadline)
        with pytest.raises(VerificationError, match="a tensor differs"):
            peers.tell(LONG, watch)


def test_half_a_message_holds_up_nobody(ends, watch):
    mine, channel = ends
    payload = channel._encoder.encode(Ack(3))
    frame = len(payload).to_bytes(4, "big") + channel._mac(channel._out, 0, payload) + payload
    channel._socket.sendall(frame[:20])
    mine.read(watch.deadline)
    assert mine.take(Ack) is None
    assert not watch.deadline.expired
    channel._socket.sendall(frame[20:])
    mine.read(watch.deadline)
    assert mine.take(Ack) == Ack(3)
