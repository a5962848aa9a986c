"""What strangers can do to memory that is open during a sync, and how syncs end."""

import threading

import pytest
import torch

from rl_ckpt_mooncake.magic import FILLED, RECORD_BYTES
from rl_ckpt_mooncake.station import Station
from rl_ckpt_mooncake.transfer import Listening, Run, Transfer
from rl_core.errors import DigestMismatchError, TransferTimeoutError
from rl_core.testing.process_holdings import held
from rl_core.testing.weight_set import WeightSet
from rl_core.torch import as_bytes
from rl_core.transfer.transport import TransportError

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def stranger():
    """A process that reaches the ports and holds no key."""
    transfer = Transfer(Listening("127.0.0.1", "tcp"))
    yield transfer
    transfer.close()


@pytest.fixture
def loot():
    return torch.full((4096,), 0xA5, dtype=torch.uint8)


def patience():
    """The strangers' transfers are not waited for by anybody else."""


def arrived(ends, weights):
    for got in ends[1:]:
        assert not isinstance(got, Exception), got
        for name, tensor in weights.tensors.items():
            assert torch.equal(as_bytes(got[name]), as_bytes(tensor))


def test_memory_is_open_during_a_sync_only(chain, weights, stranger, loot):
    opened = []

    def look(rank, entries):
        if opened:
            return
        for station in chain.stations():
            there = station.neighbour()
            opened.append((there.session, there.magic))
            opened.extend((there.session, address) for address in there.buffers)
            stranger.read(there.session, [Run(there.magic, loot.data_ptr(), 64)], "magic", patience)
        source = next(iter(weights.tensors.values())).data_ptr()
        with pytest.raises(TransportError):
            stranger.read(opened[0][0], [Run(source, loot.data_ptr(), 64)], "the weights", patience)

    arrived(chain.sync(weights, consume=look), weights)
    assert len(opened) == 4 * 3
    for session, address in opened:
        with pytest.raises(TransportError, match="not registered there"):
            stranger.read(session, [Run(address, loot.data_ptr(), 64)], "after the sync", patience)


def test_memory_is_closed_after_a_failure(chain, weights, stranger, loot):
    opened = []

    def fail(rank, entries):
        # Ranks whose neighbour has failed already are closed.
        still = [station for station in chain.stations() if station is not None]
        opened.extend((s.transfer.session, s.magic.address) for s in still)
        raise DigestMismatchError("the test's own")

    ends = chain.sync(weights, consume=fail)
    assert all(isinstance(end, Exception) for end in ends)
    assert opened
    for session, address in opened:
        with pytest.raises(TransportError):
            stranger.read(
                session, [Run(address, loot.data_ptr(), 64)], "after the failure", patience
            )
    arrived(chain.sync(weights), weights)


def test_write_into_a_bucket_is_found(chain, weights, stranger, loot, monkeypatch):
    """Before the receiver's check, wherever it happened; the tensor is named."""
    tell, written = Station.tell, []

    def meanwhile(station, neighbour, place, sequence, check):
        # The first receiver reads nothing of the second bucket before it is told of piece 5.
        second = place == FILLED and sequence >= 5
        if second and station is chain.stations()[0] and not written:
            victim = station.buffer(1)
            written.append(sequence)
            run = Run(victim.data_ptr() + 100, loot.data_ptr(), 4)
            stranger.write(station.transfer.session, run, "garbage", check)
        tell(station, neighbour, place, sequence, check)

    monkeypatch.setattr(Station, "tell", meanwhile)
    ends = chain.sync(weights)
    assert isinstance(ends[1], DigestMismatchError), ends
    assert ends[1].tensors
    assert ends[1].tensors[0] in weights.tensors
    assert isinstance(ends[0], DigestMismatchError)
    monkeypatch.undo()
    arrived(chain.sync(weights), weights)


@pytest.mark.parametrize("offset", [0, 3])
def test_forged_counters_are_ignored(chain, weights, stranger, loot, offset, monkeypatch):
    """Neither garbage nor the record of another moment moves anybody on."""
    tell, heard = Station.tell, []

    def meanwhile(station, neighbour, place, sequence, check):
        old = bytes(heard[0]) if heard and not offset else loot.numpy().tobytes()[:RECORD_BYTES]
        forged = torch.frombuffer(bytearray(old), dtype=torch.uint8)
        run = Run(neighbour.magic + place + offset, forged.data_ptr(), RECORD_BYTES - offset)
        stranger.write(neighbour.session, run, "a forged counter", check)
        tell(station, neighbour, place, sequence, check)
        at = station.magic.stage(place, sequence) - station.magic.address
        heard.append(bytes(station.magic._view[at : at + RECORD_BYTES]))

    monkeypatch.setattr(Station, "tell", meanwhile)
    arrived(chain.sync(weights), weights)
    assert heard


def test_more_weights_than_before(chain):
    """Buffers and seals grow and shrink from sync to sync over the same engines."""
    sizes = ((1, 3), (200, 40), (3, 100_000), (1, 0))
    sets = [WeightSet({f"t{n}": torch.randn(size) for n in range(count)}) for count, size in sizes]
    sessions = set()
    for weights in sets:
        arrived(chain.sync(weights), weights)
        sessions.add(tuple(station.transfer.session for station in chain.stations()))
    assert len(sessions) == 1


def test_peer_that_does_not_answer(chain, weights, monkeypatch):
    """A thread that blocks inside Mooncake does not keep its engine from ending in time."""
    chain.connect()
    stuck, read = chain.stations()[2].transfer, Transfer.read
    over, answered = threading.Event(), []

    def slow(transfer, *arguments):
        if transfer is stuck:
            answered.append(over.wait(60))
        read(transfer, *arguments)

    monkeypatch.setattr(Transfer, "read", slow)
    ends = chain.move(weights, seconds=1.0)
    assert isinstance(ends[2], TransferTimeoutError), ends
    assert not answered, "the engine waited for the thread"
    over.set()
    for engine in chain.engines:
        engine.finalize(success=False)
    monkeypatch.undo()
    arrived(chain.sync(weights), weights)


def test_nothing_listens_after_shutdown(chain):
    before = held().listening
    assert sum(door.startswith("*") for door in before) >= 2 * len(chain.engines)
    for engine in chain.engines:
        engine.shutdown()
    left = [door for door in held().listening if door.startswith("*")]
    assert len(left) <= len(before) - 2 * len(chain.engines)
