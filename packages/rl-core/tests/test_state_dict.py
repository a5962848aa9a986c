"""`send_state_dict` and `receive_state_dict` over a transport within the process."""

import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

import pytest
import torch

from rl_core.channel import new_key
from rl_core.deadlines import Deadline
from rl_core.digests import XXH3_128
from rl_core.errors import (
    DigestMismatchError,
    PeerLostError,
    StaleVersionError,
    TransferTimeoutError,
)
from rl_core.interfaces import TransferRole
from rl_core.testing.loopback_transport import LoopbackEngine, LoopbackInlet
from rl_core.transfer.state_dict import receive_state_dict, send_state_dict
from rl_core.versions import PolicyVersion

STATE = {"a": torch.randn(3, 5), "b": torch.arange(7), "c": torch.tensor(1.5, dtype=torch.bfloat16)}


@pytest.fixture
def engines():
    key = new_key()
    roles = [TransferRole("sender", 0, key=key)]
    roles += [TransferRole("receiver", rank, key=key) for rank in range(2)]
    made = [LoopbackEngine(role, 0.25) for role in roles]
    yield made
    for engine in made:
        engine.shutdown()


def move(engines, version, seconds=20.0):
    sender, *receivers = engines
    ends = [Pipe() for _ in receivers]
    ours, deadline = [pipe for pipe, _ in ends], Deadline.after(seconds)
    with ThreadPoolExecutor(2) as threads:
        received = [
            threads.submit(receive_state_dict, engine, theirs, deadline)
            for engine, (_, theirs) in zip(receivers, ends, strict=True)
        ]
        report = send_state_dict(sender, STATE, version, ours, deadline)
        return report, [call.result(seconds) for call in received]


def test_every_receiver_has_the_state_and_its_version(engines):
    for step in range(3):  # the engines are used again
        report, received = move(engines, PolicyVersion(1, step))
        assert report.payload_bytes == sum(t.nbytes for t in STATE.values())
        for version, state in received:
            assert version == PolicyVersion(1, step)
            assert list(state) == list(STATE)
            assert all(torch.equal(state[name], STATE[name]) for name in STATE)


def test_where_digests_travel_they_are_recomputed_on_what_the_caller_gets(monkeypatch):
    key, finish = new_key(), LoopbackInlet.finish
    roles = [
        TransferRole(role, 0, key=key, digest_kind=XXH3_128) for role in ("sender", "receiver")
    ]
    engines = [LoopbackEngine(role, 0.25) for role in roles]
    with monkeypatch.context() as patch:
        patch.setattr(LoopbackInlet, "finish", lambda *given: finish(*given).bitwise_xor_(1))
        with pytest.raises(DigestMismatchError, match="tensor 'a'"):
            move(engines, PolicyVersion(1, 0))
    move(engines, PolicyVersion(1, 1))
    for engine in engines:
        engine.shutdown()


def test_a_version_that_was_received_is_refused(engines):
    move(engines, PolicyVersion(1, 1))
    with pytest.raises(StaleVersionError):
        move(engines, PolicyVersion(1, 1))
    move(engines, PolicyVersion(1, 2))


def test_a_receiver_that_does_not_come_or_is_gone_is_named(engines):
    mine, theirs = Pipe()
    arguments = (engines[0], STATE, PolicyVersion(1, 0), [mine])
    with pytest.raises(TransferTimeoutError, match="receiver 0"):
        send_state_dict(*arguments, Deadline.after(0.05))
    theirs.close()
    with pytest.raises(PeerLostError, match="receiver 0"):
        send_state_dict(*arguments, Deadline.after(20))


def test_attempts_given_up_do_not_put_later_ones_out_of_step(engines):
    sender, receiver, _ = engines
    mine, theirs = Pipe()
    for _ in range(2):
        with pytest.raises(TransferTimeoutError, match="the sender"):
            receive_state_dict(receiver, theirs, Deadline.after(0.05))
    with pytest.raises(TransferTimeoutError):  # it answers a call that nobody waits for
        send_state_dict(sender, STATE, PolicyVersion(1, 0), [mine], Deadline.after(0.5))
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(receive_state_dict, receiver, theirs, Deadline.after(20))
        wait_for(mine)
        send_state_dict(sender, STATE, PolicyVersion(1, 0), [mine], Deadline.after(20))
        assert received.result(20)[0] == PolicyVersion(1, 0)


def wait_for(pipe):
    """Until the receiver has called."""
    assert pipe.poll(20)


def test_a_receiver_that_does_not_read_is_waited_for_no_longer_than_the_deadline(engines):
    mine, theirs = Pipe()
    many = {f"a tensor with a name that fills pipes, {n}": torch.zeros(1) for n in range(20_000)}
    sender, receiver, _ = engines
    with ThreadPoolExecutor(1) as threads:
        threads.submit(receive_state_dict, receiver, _Deaf(theirs), Deadline.after(3))
        with pytest.raises(TransferTimeoutError, match="does not read"):
            send_state_dict(sender, many, PolicyVersion(1, 0), [mine], Deadline.after(1))


class _Deaf:
    """A pipe whose other end is never read."""

    def __init__(self, pipe):
        self.send = pipe.send

    def poll(self, timeout):
        time.sleep(timeout)
        return False
