import errno
import os

import pytest
import torch

from rl_core.channel import Listener, connect, new_key
from rl_core.deadlines import Deadline
from rl_core.errors import TransferError
from rl_core.metadata import TensorMeta
from rl_core.shared_memory import SharedBuffer
from rl_core.torch import from_bytes


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def test_two_processes_see_the_same_bytes():
    with SharedBuffer.create(4096) as buffer:
        child = os.fork()
        if child == 0:
            SharedBuffer(os.dup(buffer.fd), 4096).view[:5] = b"child"
            os._exit(0)
        os.waitpid(child, 0)
        assert bytes(buffer.view[:5]) == b"child"


def test_a_descriptor_travels_over_a_channel():
    key = new_key()
    with Listener() as listener, SharedBuffer.create(64) as mine:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(listener.accept, key, int, Deadline.after(10))
            with connect(listener.address, key, int, Deadline.after(10)) as right:
                left = accepted.result(10)
                left.send_fd(mine.fd, Deadline.after(10))
                with left, SharedBuffer(right.receive_fd(Deadline.after(10)), 64) as theirs:
                    mine.view[:4] = b"over"
                    assert bytes(theirs.view[:4]) == b"over"


def test_tensors_outlive_the_close():
    buffer = SharedBuffer.create(64)
    tensor = from_bytes(
        torch.frombuffer(buffer.view, dtype=torch.uint8), TensorMeta("x", (16,), "float32")
    )
    tensor.fill_(2.0)
    buffer.close()
    buffer.close()
    assert tensor.sum() == 32


def test_nothing_is_left_behind():
    before = descriptors()
    for _ in range(10):
        with SharedBuffer.create(1 << 20):
            pass
    assert descriptors() == before
    assert not [name for name in os.listdir("/dev/shm") if "minirl" in name]


def test_no_memory_is_a_named_error_with_the_remedy(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransferError, match=r"1024 bytes.*update_weights_bucket_megabytes"):
        SharedBuffer.create(1024)
    assert descriptors() == before


def test_other_errors_come_through(monkeypatch):
    def odd(*_):
        raise OSError(errno.EPERM, "sealed")

    monkeypatch.setattr(os, "posix_fallocate", odd)
    with pytest.raises(PermissionError):
        SharedBuffer.create(1024)
