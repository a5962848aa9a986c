"""Groups of their own: beside a default group, with any library, ended while they block."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from rl_ckpt_hccl import gloo_sockets, process_group
from rl_ckpt_hccl.communicator import Communicator
from rl_ckpt_hccl.config import HcclConfig
from rl_ckpt_hccl.engine import HcclCheckpointEngine
from rl_ckpt_hccl.gloo_sockets import GlooSockets, _listening
from rl_ckpt_hccl.process_group import Library, Member, check_torch, make_group
from rl_ckpt_hccl.store import join_store, serve_store
from rl_ckpt_hccl.transport import BroadcastTransport
from rl_core.channel import new_key
from rl_core.deadlines import CancelToken, Deadline
from rl_core.errors import ComponentNotFoundError, IncompatibleVersionError, TransferError
from rl_core.interfaces import TransferRole
from rl_core.testing.weight_set import WeightSet
from rl_core.torch import as_bytes
from rl_core.transfer.engine import StreamingEngine
from rl_core.transfer.plan import TransferPlan
from rl_core.transfer.watch import Watch
from rl_core.versions import PolicyVersion

SECONDS = 20.0

SO_MAX_PACING_RATE = 47  # linux/socket.h; the socket module does not name it


class FakeHccl(dist.ProcessGroupGloo):
    """What torch_npu registers for hccl, with gloo's works: ended by a method of its own."""

    def __init__(self, options, _):
        self._sockets = GlooSockets()
        with self._sockets.noticing_listener():
            device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        self._sockets.exchange(options.store, options.group_rank, options.group_size)
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices, gloo._timeout = [device], options.timeout
        super().__init__(options.store, options.group_rank, options.group_size, gloo)

    def abort_hccl_comm(self, reason):
        assert isinstance(reason, str)  # torch_npu binds it without a default
        self._sockets.break_off()


@pytest.fixture
def fake_hccl(monkeypatch):
    """A vendor plug-in named hccl, on the cpu."""
    plugin = dist.Backend._BackendPlugin(FakeHccl, extended_api=True)
    monkeypatch.setitem(dist.Backend._plugins, "HCCL", plugin)
    check_torch.cache_clear()
    yield
    check_torch.cache_clear()


def _ranks(library, size=2):
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as threads:
        return list(
            threads.map(lambda rank: make_group(library, store, (rank, size), SECONDS), range(size))
        )


@pytest.mark.parametrize("name", ["gloo", "hccl"])
def test_broadcast(name, fake_hccl):
    members = _ranks(Library(name), 3)
    data = [torch.full((1000,), rank, dtype=torch.uint8) for rank in (7, 0, 0)]
    for work in [m.broadcast(d, SECONDS) for m, d in zip(members, data, strict=True)]:
        work.wait()
    assert all(torch.equal(item, data[0]) for item in data)


def test_default_group_is_left_alone():
    before = dist.is_initialized(), dict(dist.Backend._plugins)
    members = _ranks(Library("gloo"))
    assert (dist.is_initialized(), dict(dist.Backend._plugins)) == before
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        data = torch.arange(3)
        dist.broadcast(data, 0)
        for work in [m.broadcast(torch.zeros(3), SECONDS) for m in members]:
            work.wait()
    finally:
        dist.destroy_process_group()
    for work in [m.broadcast(torch.zeros(3), SECONDS) for m in members]:
        work.wait()


def test_whole_engine_over_a_plugin(fake_hccl):
    """The path of a device's library: completion is polled, not waited for."""
    weights = WeightSet({f"t{n}": torch.randn(100 + n) for n in range(20)})
    library, key = Library("hccl"), new_key()
    sender, receiver = (
        StreamingEngine(
            TransferRole(role, 0, key=key, bucket_megabytes=1 / 1024),
            BroadcastTransport(library, 0.25, SECONDS),
        )
        for role in ("sender", "receiver")
    )
    places = StreamingEngine.build_topology([sender.prepare()], [receiver.prepare()])
    manifest = weights.manifest(PolicyVersion(1, 0))
    got = {}

    def receive():
        receiver.build_process_group(places["receiver"][0], Deadline.after(SECONDS))
        for lease in receiver.receive_weights(manifest, Deadline.after(SECONDS), CancelToken()):
            with lease as entries:
                got.update({entry.meta.name: entry.tensor.clone() for entry in entries})

    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(receive)
        sender.build_process_group(places["sender"][0], Deadline.after(SECONDS))
        stream = zip(weights.metas, weights.tensors.values(), strict=True)
        sender.send_weights(stream, manifest, Deadline.after(SECONDS), CancelToken())
        receiving.result()
    for engine in (sender, receiver):
        engine.finalize(success=True)
        engine.shutdown()
    for name, tensor in weights.tensors.items():
        assert torch.equal(as_bytes(got[name]), as_bytes(tensor))


def test_torch_without_what_is_needed_is_named(monkeypatch):
    check_torch.cache_clear()
    monkeypatch.delattr(dist.ProcessGroupGloo, "create_device")
    role = TransferRole("sender", 0, key=new_key())
    try:
        with pytest.raises(
            IncompatibleVersionError, match=f"torch {torch.__version__}".split("+")[0]
        ):
            HcclCheckpointEngine(HcclConfig(), role)
    finally:
        check_torch.cache_clear()


@pytest.mark.skipif("HCCL" in dist.Backend._plugins, reason="torch_npu is loaded")
def test_hccl_without_torch_npu_says_so(monkeypatch):
    check_torch.cache_clear()

    def missing(name):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(process_group.importlib, "import_module", missing)
    with pytest.raises(ComponentNotFoundError, match="torch_npu"):
        HcclCheckpointEngine(HcclConfig(), TransferRole("sender", 0, "npu", key=new_key()))


@pytest.mark.parametrize("told", [b"\xff\xfe", b"127.0.0.1", b"127.0.0.1 eighty", b""])
def test_what_a_stranger_wrote_into_the_store_is_a_transfer_error(told):
    """torch's stores ask nobody who they are."""
    store = dist.HashStore()
    store.set("address/1", told)
    with pytest.raises(TransferError, match="address of rank 1; somebody else"):
        Communicator.connect(Library("gloo"), store, (0, 2), Watch(Deadline.after(SECONDS)))


@pytest.mark.parametrize("name", ["gloo", "hccl"])
def test_group_is_ended_while_it_blocks(name, fake_hccl):
    """In a fraction of its timeout, without touching anybody else's connections."""
    bystander = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(bystander.getsockname())
    server = bystander.accept()[0]
    members = _two_members(name)
    work = members[1].broadcast(torch.zeros(10), SECONDS)  # rank 0 never sends
    threading.Timer(0.1, members[1].leave).start()
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        work.wait()
    assert time.monotonic() - begin < SECONDS / 4
    client.sendall(b"alive")
    assert server.recv(5) == b"alive"
    for each in (client, server, bystander):
        each.close()


def test_plugin_without_an_abort_of_its_own_is_named(monkeypatch, fake_hccl, caplog):
    """torch gives every backend one that does nothing."""
    _ranks(Library("hccl"), 1)
    assert not caplog.records
    monkeypatch.delattr(FakeHccl, "abort_hccl_comm")
    _ranks(Library("hccl"), 1)
    assert "FakeHccl has no abort of its own" in caplog.text


@pytest.mark.parametrize("under_way", [True, False])
def test_memory_of_a_work_under_way_is_not_used_again(under_way):
    """It may still be written when the next sync has begun."""
    members, watch = _two_members(), Watch(Deadline.after(SECONDS))
    transport = BroadcastTransport(Library("gloo"), 0, SECONDS)
    transport._communicator = Communicator(members[1], 1)
    plan = TransferPlan.of(WeightSet({"tensor": torch.zeros(10)}).metas, 64, 0)
    inlet = transport.inlet(plan, {}, watch)
    inlet.start(0)
    if not under_way:
        members[0].broadcast(torch.zeros(40, dtype=torch.uint8), SECONDS)
        inlet.finish(0)
    buffer = transport._buffers.of(0)
    transport.leave()
    transport._buffers.fit(plan)
    assert (transport._buffers.of(0) is buffer) is not under_way


@pytest.mark.parametrize("leaving", [0, 1])
def test_what_is_under_way_ends_with_the_group(leaving):
    """Also the message in the middle, which gloo forgets; see gloo_sockets."""
    members, works = _message_under_way()
    members[leaving].leave()
    assert _ended(works)


def test_message_of_a_slow_network_arrives():
    """In a thread; the failure that is to be told does not wait for it."""
    members, works = _message_under_way(SECONDS, bytes_per_s=24 << 20)  # for 2.7 s
    for member in members:
        member.leave()
    assert not any(work.is_completed() for work in works)
    assert _ended(works, 8.0)
    assert all(work.is_success() for work in works)


def test_gloo_forgets_the_message_in_the_middle(monkeypatch):
    """If this fails, `GlooSockets.break_off` need not wait any more: gloo has been mended."""
    monkeypatch.setattr(gloo_sockets, "DRAIN_S", 0.0)
    members, works = _message_under_way()
    members[0].leave()
    assert not _ended(works)


def _two_members(name="gloo"):
    """Ranks 0 and 1 of a group, both in this process."""
    library, store = Library(name), dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(make_group, library, store, (0, 2), SECONDS)
        while not store.check(["address/0"]):  # one after the other: see noticing_listener
            time.sleep(0.01)
        second = make_group(library, store, (1, 2), SECONDS)
        return [first.result(), second]


def _message_under_way(seconds=3.0, bytes_per_s=None):
    """Two members, and their works for a broadcast that has just begun to move."""
    members = _two_members()
    if bytes_per_s:
        for connection in members[0]._break_off.__self__._connections():
            with connection:
                connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
    data = [torch.full((64 << 20,), value, dtype=torch.uint8) for value in (1, 0)]
    works = [member.broadcast(each, seconds) for member, each in zip(members, data, strict=True)]
    while not data[1][0]:
        time.sleep(0)
    return members, works


def _ended(works, seconds=1.0):
    """Whether all works end within that time, long before their timeout."""
    end = time.monotonic() + seconds
    while not all(work.is_completed() for work in works) and time.monotonic() < end:
        time.sleep(0.01)
    return all(work.is_completed() for work in works)


def test_an_equal_port_of_another_host_is_not_the_peers():
    with socket.create_server(("127.0.0.2", 0)) as elsewhere:
        port = elsewhere.getsockname()[1]
        client = socket.create_connection(("127.0.0.2", port))
        server = elsewhere.accept()[0]
    sockets, store = GlooSockets(), dist.HashStore()
    store.set("address/1", f"127.0.0.1 {port}")
    sockets.exchange(store, 0, 2)
    sockets.break_off()
    with client, server:
        client.sendall(b"alive")
        assert server.recv(5) == b"alive"


def test_listener_that_cannot_be_told_apart_is_not_guessed():
    sockets = GlooSockets()
    with sockets.noticing_listener():
        opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    sockets.exchange(dist.HashStore(), 0, 1)
    sockets.break_off()
    for each in opened:
        each.close()


def test_store_is_on_the_interface_given():
    store, address = serve_store("127.0.0.1", SECONDS)
    port = int(address.rpartition(":")[2])
    assert ("127.0.0.1", port) in set(_listening())
    store.set("name", "value")
    assert join_store(address, SECONDS).get("name") == b"value"


def test_store_that_is_not_there():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(TransferError, match="cannot reach"):
            join_store(f"127.0.0.1:{unused.getsockname()[1]}", 0.2)
    with pytest.raises(TransferError, match="cannot serve"):
        serve_store("198.51.100.1", 0.2)


def test_leaving_does_not_wait_for_a_work_that_nobody_ends():
    """A group's destructor waits for its works, however long their timeouts are."""
    ended = threading.Event()

    class Waiting:
        def __del__(self):
            ended.wait(20)

    begun = time.monotonic()
    Member("gloo", Waiting(), lambda: None).leave()
    assert time.monotonic() - begun < 5
    ended.set()
