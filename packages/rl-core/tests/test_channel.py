import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.channel import MAX_MESSAGE_BYTES, Channel, Listener, connect, new_key
from rl_core.deadlines import Deadline
from rl_core.errors import MessageError, TransferError, TransferTimeoutError

KEY = new_key()
SOON = 10.0
FRAME = 4 + 32


class Note(msgspec.Struct, tag=True):
    number: int
    text: str = ""


class Other(msgspec.Struct, tag=True):
    value: float


TYPES = Note | Other


def soon():
    return Deadline.after(SOON)


def pair(key=KEY, other=KEY, host=None):
    """Two ends of one connection."""
    with Listener(host) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, key, TYPES, soon())
        connected = connect(listener.address, other, TYPES, soon())
        return accepted.result(SOON), connected


class Tap:
    """Two channels with a person in the middle, who holds every frame."""

    def __init__(self):
        near, far = socket.socketpair()
        other_near, other_far = socket.socketpair()
        self.sockets = far, other_far
        with ThreadPoolExecutor(2) as pool:
            left = pool.submit(Channel, near, KEY, TYPES, soon(), accepted=True)
            right = pool.submit(Channel, other_near, KEY, TYPES, soon(), accepted=False)
            for size in (16, 32):  # nonce, proof
                a, b = (read(end, size) for end in self.sockets)
                far.sendall(b)
                other_far.sendall(a)
            self.left, self.right = left.result(SOON), right.result(SOON)

    def frame(self, message):
        """What the left end sends for `message`, taken off the wire."""
        self.left.send(message, soon())
        return self.take(self.sockets[0])

    def take(self, end):
        head = read(end, 4)
        return head + read(end, 32 + struct.unpack(">I", head)[0])

    def deliver(self, data):
        self.sockets[1].sendall(data)

    def close(self):
        for end in (*self.sockets, self.left, self.right):
            end.close()


def read(end, size):
    end.settimeout(SOON)
    data = b""
    while len(data) < size:
        part = end.recv(size - len(data))
        assert part
        data += part
    return data


@pytest.fixture
def tap():
    tapped = Tap()
    yield tapped
    tapped.close()


notes = st.builds(Note, st.integers(-(2**63), 2**63 - 1), st.text())


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
@settings(max_examples=10, deadline=None)
@given(messages=st.lists(notes, max_size=5))
def test_messages_arrive_in_order_both_ways(host, messages):
    left, right = pair(host=host)
    with left, right:
        for message in messages:
            left.send(message, soon())
            right.send(message, soon())
        assert [right.receive(soon()) for _ in messages] == messages
        assert [left.receive(soon()) for _ in messages] == messages


def test_large_message_crosses_while_the_other_side_sends_too():
    left, right = pair()
    big = Note(1, "x" * (8 << 20))
    with left, right, ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(end.send, big, soon()) for end in (left, right)]
        assert right.receive(soon()) == big
        assert left.receive(soon()) == big
        for future in sent:
            future.result(SOON)


def test_too_long_messages_are_refused_by_the_sender():
    left, right = pair()
    with left, right, pytest.raises(MessageError, match="exceeds"):
        left.send(Note(1, "x" * (MAX_MESSAGE_BYTES + 1)), soon())


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_wrong_key_is_refused_on_both_sides(host):
    with Listener(host) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, KEY, TYPES, soon())
        with pytest.raises((MessageError, TransferError)):
            connect(listener.address, new_key(), TYPES, soon()).receive(soon())
        with pytest.raises(MessageError, match="key"):
            accepted.result(SOON)


def test_unmodified_frames_pass_the_tap(tap):
    tap.deliver(tap.frame(Note(1)))
    tap.deliver(tap.frame(Note(2)))
    assert [tap.right.receive(soon()).number for _ in range(2)] == [1, 2]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_forged_frame_is_never_accepted(data):
    tap = Tap()
    try:
        frame = bytearray(tap.frame(Note(7, "weights")))
        place = data.draw(st.integers(4, len(frame) - 1))
        frame[place] ^= data.draw(st.integers(1, 255))
        tap.deliver(bytes(frame))
        with pytest.raises(MessageError, match="authentic"):
            tap.right.receive(soon())
        with pytest.raises(TransferError):  # closed for good
            tap.right.receive(soon())
    finally:
        tap.close()


def test_replayed_frame_is_refused(tap):
    frame = tap.frame(Note(1))
    tap.deliver(frame + frame)
    assert tap.right.receive(soon()) == Note(1)
    with pytest.raises(MessageError, match="out of order"):
        tap.right.receive(soon())


def test_reordered_frames_are_refused(tap):
    first, second = tap.frame(Note(1)), tap.frame(Note(2))
    tap.deliver(second + first)
    with pytest.raises(MessageError, match=r"message 0 .* out of order"):
        tap.right.receive(soon())


def test_lost_frame_is_noticed_at_the_next(tap):
    tap.frame(Note(1))
    tap.deliver(tap.frame(Note(2)))
    with pytest.raises(MessageError, match="out of order"):
        tap.right.receive(soon())


def test_reflected_frame_is_refused(tap):
    frame = tap.frame(Note(1))
    tap.sockets[0].sendall(frame)
    with pytest.raises(MessageError, match="authentic"):
        tap.left.receive(soon())


def test_frame_of_another_connection_is_refused(tap):
    other = Tap()
    try:
        tap.deliver(other.frame(Note(1)))
        with pytest.raises(MessageError, match="authentic"):
            tap.right.receive(soon())
    finally:
        other.close()


@pytest.mark.parametrize("cut", [0, 2, 4, 20, FRAME, FRAME + 3])
def test_truncated_frame_is_a_lost_peer(tap, cut):
    frame = tap.frame(Note(1, "some text"))
    tap.deliver(frame[:cut])
    tap.sockets[1].close()
    with pytest.raises(TransferError, match="closed"):
        tap.right.receive(soon())


def test_oversized_announcement_is_refused_before_it_is_read(tap):
    tap.deliver(struct.pack(">I", MAX_MESSAGE_BYTES + 1))
    with pytest.raises(MessageError, match="exceeds"):
        tap.right.receive(soon())


def test_authentic_message_of_the_wrong_type_is_malformed():
    class Unknown(msgspec.Struct, tag=True):
        number: int

    left, right = pair()
    with left, right:
        left.send(Unknown(1), soon())
        left.send(Note(2), soon())
        with pytest.raises(MessageError, match="malformed"):
            right.receive(soon())
        assert right.receive(soon()) == Note(2)


@settings(max_examples=40, deadline=None)
@given(garbage=st.binary(min_size=0, max_size=200))
def test_garbage_after_the_handshake_is_never_accepted(garbage):
    tap = Tap()
    try:
        tap.deliver(garbage)
        tap.sockets[1].close()
        with pytest.raises((MessageError, TransferError)):
            tap.right.receive(soon())
    finally:
        tap.close()


@settings(max_examples=40, deadline=None)
@given(garbage=st.binary(min_size=0, max_size=100), closes=st.booleans())
def test_garbage_instead_of_a_handshake_is_never_accepted(garbage, closes):
    with Listener() as listener, ThreadPoolExecutor(1) as pool:
        within = Deadline.after(SOON if closes else 0.05)
        accepted = pool.submit(listener.accept, KEY, TYPES, within)
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect("\0" + listener.address.partition(":")[2])
            peer.sendall(garbage)
            if closes:
                peer.shutdown(socket.SHUT_WR)
            with pytest.raises((MessageError, TransferError)):
                accepted.result(SOON)


def test_silence_ends_at_the_deadline():
    left, right = pair()
    with left, right:
        with pytest.raises(TransferTimeoutError, match="a message"):
            right.receive(Deadline.after(0.02))
        left.send(Note(1), soon())
        assert right.receive(soon()) == Note(1)


def test_a_receive_that_timed_out_halfway_can_be_repeated(tap):
    frame = tap.frame(Note(1, "in two parts"))
    for cut in (2, 20):
        tap.deliver(frame[:cut])
        with pytest.raises(TransferTimeoutError):
            tap.right.receive(Deadline.after(0.02))
        frame = frame[cut:]
    tap.deliver(frame)
    assert tap.right.receive(soon()) == Note(1, "in two parts")


def test_a_send_that_timed_out_closes_the_channel():
    left, right = pair()
    with left, right:
        with pytest.raises(TransferTimeoutError):
            left.send(Note(1, "x" * (32 << 20)), Deadline.after(0.05))
        with pytest.raises(TransferError):
            left.send(Note(2), soon())
        with pytest.raises(TransferError, match="closed"):
            right.receive(soon())


def test_sending_does_not_shorten_a_wait_for_a_message():
    left, right = pair()
    with left, right, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(left.receive, soon())
        for number in range(20):
            left.send(Note(number), Deadline.after(0.05))
            time.sleep(0.005)
        right.send(Note(99), soon())
        assert waiting.result(SOON) == Note(99)


def test_nobody_connects():
    with Listener() as listener, pytest.raises(TransferTimeoutError):
        listener.accept(KEY, TYPES, Deadline.after(0.02))


@pytest.mark.parametrize("address", ["unix:minirl-nobody", "tcp:127.0.0.1:1", "smoke:signals"])
def test_connecting_to_nobody_is_an_error(address):
    with pytest.raises(TransferError):
        connect(address, KEY, TYPES, soon())


def test_a_peer_that_is_gone_is_noticed():
    left, right = pair()
    left.close()
    left.close()
    with right, pytest.raises(TransferError, match="closed"):
        right.receive(soon())


def test_descriptors_cross():
    left, right = pair()
    with left, right:
        reading, writing = os.pipe()
        left.send_fd(writing, soon())
        os.close(writing)
        mine = right.receive_fd(soon())
        os.write(mine, b"through")
        assert os.read(reading, 7) == b"through"
        for fd in (mine, reading):
            os.close(fd)


def test_a_message_in_place_of_a_descriptor_is_refused():
    left, right = pair()
    with left, right:
        left.send(Note(1), soon())
        with pytest.raises(MessageError, match="descriptor"):
            right.receive_fd(soon())


def test_connections_leave_no_descriptors_open():
    pair()[0].close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        left, right = pair()
        left.close()
        right.close()
        with pytest.raises((MessageError, TransferError)):
            pair(other=new_key())
    assert len(os.listdir("/proc/self/fd")) <= before
    assert threading.active_count() < 50
