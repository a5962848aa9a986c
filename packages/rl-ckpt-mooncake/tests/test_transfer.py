"""The TransferEngine itself: codes become errors, and what it would swallow is refused."""

import importlib
import signal
import socket
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch

from rl_ckpt_mooncake import transfer as transfer_module
from rl_ckpt_mooncake.config import MooncakeConfig
from rl_ckpt_mooncake.engine import MooncakeCheckpointEngine
from rl_ckpt_mooncake.library import load_library
from rl_ckpt_mooncake.transfer import Listening, Run, Transfer
from rl_core.channel import new_key
from rl_core.deadlines import Deadline
from rl_core.errors import (
    ComponentLoadError,
    ComponentNotFoundError,
    ConfigError,
    IncompatibleVersionError,
    TransferTimeoutError,
)
from rl_core.interfaces import TransferRole
from rl_core.transfer.transport import TransportError


@pytest.fixture(scope="module")
def pair():
    made = [Transfer(Listening("127.0.0.1", "tcp")) for _ in range(2)]
    yield made
    for each in made:
        each.close()


def patience():
    return partial(Deadline.after(20).check, "the test's transfer")


def test_reads_and_writes(pair):
    reader, owner = pair
    theirs = (torch.arange(3 << 20) % 251).to(torch.uint8)
    mine = torch.zeros_like(theirs)
    there, here, half = theirs.data_ptr(), mine.data_ptr(), (1 << 20) + 3
    owner.register(there, theirs.numel(), "theirs")
    try:
        runs = [Run(there, here, half), Run(0, 0, 0), Run(there + half, here + half, 9)]
        reader.read(owner.session, runs, "a test", patience())
        assert torch.equal(mine[: half + 9], theirs[: half + 9])
        assert not mine[half + 9 :].any()
        reader.read(owner.session, [], "nothing", patience())
        mine[:7] = 9
        reader.write(owner.session, Run(there, here, 7), "a test", patience())
        assert theirs[:8].tolist() == [9] * 7 + [7]
    finally:
        owner.unregister(there, "theirs")


def test_failures_say_what_and_why(pair):
    reader, owner = pair
    memory = torch.zeros(4096, dtype=torch.uint8)
    address = memory.data_ptr()
    run = Run(address, address, 64)
    refused = pytest.raises(TransportError, match=r"x .* returned -1: .*not registered there")
    with refused:
        reader.read(owner.session, [run], "x", patience())
    with refused:
        reader.write(owner.session, run, "x", patience())
    owner.register(address, 4096, "memory")
    with pytest.raises(TransportError, match="registering memory again: Mooncake returned -7"):
        owner.register(address + 16, 64, "memory again")
    for bad in (Run(address + 4000, address, 200), Run(address - 64, address, 64)):
        for runs in ([bad, run], [run, bad]):
            with refused:
                reader.read(owner.session, runs, "x", patience())
    owner.unregister(address, "memory")
    with pytest.raises(TransportError, match="unregistering memory: Mooncake returned -3"):
        owner.unregister(address, "memory")


def test_nobody_there_is_an_error(pair):
    memory = torch.zeros(64, dtype=torch.uint8)
    run = Run(memory.data_ptr(), memory.data_ptr(), 64)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        session = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(TransportError, match=f"reading x from {session}"):
            pair[0].read(session, [run], "x", patience())
        with pytest.raises(TransportError, match=f"writing x to {session}"):
            pair[0].write(session, run, "x", patience())


@pytest.mark.engine
def test_peer_that_stands_still():
    """The wait is ended by the caller, and the engine can be closed with the read under way."""
    program = Path(__file__).with_name("serve_memory.py")
    with subprocess.Popen(
        [sys.executable, str(program), str(SERVED)], stdout=subprocess.PIPE, text=True
    ) as peer:
        try:
            session, address = peer.stdout.readline().split()
            reader = Transfer(Listening("127.0.0.1", "tcp"))
            mine = torch.zeros(SERVED, dtype=torch.uint8)
            run = Run(int(address), mine.data_ptr(), SERVED)
            reader.read(session, [run], "all", patience())
            assert mine.all()
            peer.send_signal(signal.SIGSTOP)
            check = partial(Deadline.after(0.3).check, "a peer that stands still")
            with pytest.raises(TransferTimeoutError, match="a peer that stands still"):
                reader.read(session, [run], "x", check)
            reader.close()
        finally:
            peer.kill()


SERVED = 8 << 20


def test_closed_engine_is_an_error():
    transfer = Transfer(Listening("127.0.0.1", "tcp"))
    transfer.close()
    transfer.close()
    with pytest.raises(TransportError, match="closed"):
        transfer.register(4096, 1, "x")


@pytest.mark.parametrize("protocol", ["shm", "cxl", "TCP", "", "bogus"])
def test_protocols_that_mooncake_would_take_are_refused(protocol):
    with pytest.raises(ConfigError, match="use tcp"):
        Transfer(Listening("127.0.0.1", protocol))


def test_rdma_without_a_device_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(transfer_module, "_INFINIBAND", tmp_path)
    role = TransferRole("sender", 0, key=new_key())
    with pytest.raises(ConfigError, match="no RDMA device"):
        MooncakeCheckpointEngine(MooncakeConfig(protocol="rdma"), role)
    (tmp_path / "mlx5_0").touch()
    transfer_module.check_protocol("rdma")


def test_forced_tcp_is_not_taken_for_another_protocol(monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(ConfigError, match="MC_FORCE_TCP"):
        transfer_module.check_protocol("ascend")
    transfer_module.check_protocol("tcp")


def failing(error):
    def load(name):
        raise error

    return load


@pytest.mark.parametrize(
    ("device", "extra"),
    [("cpu", r"\[cpu\]"), ("cuda", r"\[cuda\].*\[cuda13\]"), ("npu", r"\[npu\]")],
)
def test_missing_mooncake_names_the_extra(monkeypatch, device, extra):
    error = ModuleNotFoundError("No module named 'mooncake'")
    monkeypatch.setattr(importlib, "import_module", failing(error))
    with pytest.raises(ComponentNotFoundError, match=f"pip install 'rl-ckpt-mooncake{extra}'"):
        load_library(device)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("libibverbs.so.1: cannot open shared object file", "Debian package libibverbs1"),
        ("libnuma.so.1: cannot open shared object file", "Debian package libnuma1"),
        ("libcudart.so.12: cannot open shared object file", "CUDA runtime"),
        ("libascendcl.so: cannot open shared object file", "CANN"),
        ("undefined symbol: whatever", "cannot be loaded: undefined symbol"),
    ],
)
def test_missing_shared_library_names_its_package(monkeypatch, text, remedy):
    monkeypatch.setattr(importlib, "import_module", failing(ImportError(text)))
    with pytest.raises(ComponentLoadError, match=remedy):
        load_library("cpu")


def test_other_mooncake_is_named(monkeypatch):
    old = types.SimpleNamespace(TransferEngine=type("Old", (), {"initialize": None}))
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    with pytest.raises(IncompatibleVersionError, match="register_memory"):
        load_library("cpu")


def test_senders_that_only_draw_their_streams_load_nothing():
    code = (
        "import sys\n"
        "from rl_ckpt_mooncake.config import MooncakeConfig\n"
        "from rl_ckpt_mooncake.engine import MooncakeCheckpointEngine\n"
        "from rl_core.interfaces import TransferRole\n"
        "for role in [('sender', 1), ('sender', 0)]:\n"
        "    MooncakeCheckpointEngine(MooncakeConfig(), TransferRole(*role, key=b'k' * 32))\n"
        "    print('mooncake.engine' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["False", "True"]
