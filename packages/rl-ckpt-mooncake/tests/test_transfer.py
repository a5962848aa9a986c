"""The TransferEngine itself: codes become errors, and what it would swallow is refused."""

import importlib
import types

import pytest
import torch

from rl_ckpt_mooncake import transfer as transfer_module
from rl_ckpt_mooncake.config import MooncakeConfig
from rl_ckpt_mooncake.engine import MooncakeCheckpointEngine
from rl_ckpt_mooncake.library import load_library
from rl_ckpt_mooncake.transfer import TCP_READ_BYTES, Listening, Run, Transfer
from rl_core.channel import new_key
from rl_core.errors import (
    ComponentLoadError,
    ComponentNotFoundError,
    ConfigError,
    IncompatibleVersionError,
)
from rl_core.interfaces import TransferRole
from rl_core.transfer.transport import TransportError


@pytest.fixture(scope="module")
def pair():
    made = [Transfer(Listening("127.0.0.1", "tcp")) for _ in range(2)]
    yield made
    for each in made:
        each.close()


def test_reads_and_writes(pair):
    reader, owner = pair
    theirs = torch.arange(3 * TCP_READ_BYTES + 5) % 251
    theirs = theirs.to(torch.uint8)
    mine = torch.zeros_like(theirs)
    owner.register(theirs.data_ptr(), theirs.numel(), "theirs")
    try:
        runs = [
            Run(theirs.data_ptr(), mine.data_ptr(), 2 * TCP_READ_BYTES + 3),
            Run(0, 0, 0),
            Run(
                theirs.data_ptr() + 2 * TCP_READ_BYTES + 3,
                mine.data_ptr() + 2 * TCP_READ_BYTES + 3,
                9,
            ),
        ]
        reader.read(owner.session, runs, "a test")
        end = 2 * TCP_READ_BYTES + 12
        assert torch.equal(mine[:end], theirs[:end])
        assert not mine[end:].any()
        reader.read(owner.session, [], "nothing")
        mine[:7] = 9
        reader.write(owner.session, Run(theirs.data_ptr(), mine.data_ptr(), 7), "a test")
        assert theirs[:8].tolist() == [9] * 7 + [7]
    finally:
        owner.unregister(theirs.data_ptr(), "theirs")


def test_failures_say_what_and_why(pair):
    reader, owner = pair
    memory = torch.zeros(4096, dtype=torch.uint8)
    run = Run(memory.data_ptr(), memory.data_ptr(), 64)
    for call in (
        lambda: reader.read(owner.session, [run], "x"),
        lambda: reader.write(owner.session, run, "x"),
    ):
        with pytest.raises(TransportError, match=r"x .* returned -1: .*not registered there"):
            call()
    owner.register(memory.data_ptr(), 4096, "memory")
    with pytest.raises(TransportError, match="registering memory again: Mooncake returned -7"):
        owner.register(memory.data_ptr() + 16, 64, "memory again")
    with pytest.raises(TransportError, match="returned -1"):
        reader.read(owner.session, [Run(memory.data_ptr() + 4000, memory.data_ptr(), 200)], "x")
    owner.unregister(memory.data_ptr(), "memory")
    with pytest.raises(TransportError, match="unregistering memory: Mooncake returned -3"):
        owner.unregister(memory.data_ptr(), "memory")


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
