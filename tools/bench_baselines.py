"""What the checkpoint engines are compared with: the same bytes moved by hand.

Plain loops over plain library calls, without acknowledgement, manifest, deadline or error handling.
Every method returns when it started (rank 0) or when it had the last byte (the others).
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from bench_weights import Weights
from safetensors import safe_open
from safetensors.torch import save_file

from rl_core.torch import as_bytes


class Baselines:
    """The baselines of one rank; rank 0 has the bytes, the others want them."""

    def __init__(self, rank: int, bucket: int, weights: dict[str, Weights]) -> None:
        self._rank = rank
        self._bucket_bytes = bucket
        self._weights = weights
        self._data = next(iter(weights.values())).data
        self._buffer = torch.zeros(bucket, dtype=torch.uint8)
        self._mooncake: Any = None
        self._source: tuple[str, int] = ("", 0)

    def connect(self, port: int, size: int) -> None:
        """Join the default process group."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        address = f"tcp://127.0.0.1:{port}"
        timeout = timedelta(seconds=120)
        dist.init_process_group("gloo", address, timeout, size, self._rank)
        dist.barrier()

    def naive(self, shape: str, root: str) -> float:
        """Pack into one bucket, broadcast it, copy out of it, again and again."""
        del root
        dist.barrier()
        begin, done = time.monotonic(), 0
        for start, end in self._bounds():
            buffer = self._buffer[: end - start]
            if self._rank == 0:
                self._pack(shape, start, end)
            dist.broadcast(buffer, 0)
            if self._rank:
                self._data[start:end].copy_(buffer)
            done = end
        assert done == self._data.numel()
        return begin if self._rank == 0 else time.monotonic()

    def raw(self, shape: str, root: str) -> float:
        """Broadcast from where the bytes are, into one bucket that nobody reads."""
        del shape, root
        dist.barrier()
        begin = time.monotonic()
        for start, end in self._bounds():
            source = self._data[start:end] if self._rank == 0 else self._buffer[: end - start]
            dist.broadcast(source, 0)
        return begin if self._rank == 0 else time.monotonic()

    def copied(self, shape: str, root: str) -> float:
        """Broadcast half a bucket at a time; each half is copied out while the next is coming."""
        del shape, root
        return self._overlapped(lambda _: None)

    def checked(self, shape: str, root: str) -> float:
        """The same, with the digest of each half taken where it comes from and where it goes."""
        del shape, root
        return self._overlapped(lambda data: xxhash.xxh3_128_intdigest(data.numpy()))

    def _overlapped(self, look: Callable[[torch.Tensor], object]) -> float:
        half = self._bucket_bytes // 2
        total = self._data.numel()
        places = list(pairwise([*range(0, total, half), total]))
        dist.barrier()
        begin = time.monotonic()
        last: tuple[torch.Tensor, torch.Tensor] | None = None
        for number, (start, end) in enumerate(places):
            there = self._data[start:end]
            here = there
            if self._rank:
                here = self._buffer[number % 2 * half :][: end - start]
            work = dist.broadcast(here, 0, async_op=True)
            if self._rank == 0:
                look(here)
            elif last is not None:
                _take(last, look)
            work.wait()
            last = (here, there)
        if self._rank and last is not None:
            _take(last, look)
        return begin if self._rank == 0 else time.monotonic()

    def serve_reads(self, shape: str) -> tuple[str, int]:
        """Rank 0: let Mooncake's engine read the bytes; where they are."""
        del shape
        if self._mooncake is None:
            self._mooncake = _mooncake()
            _check(self._mooncake.register_memory(self._data.data_ptr(), self._data.numel()))
        return f"127.0.0.1:{self._mooncake.get_rpc_port()}", self._data.data_ptr()

    def accept_reads(self, source: tuple[str, int]) -> None:
        """The others: where to read."""
        if self._mooncake is None:
            self._mooncake = _mooncake()
            _check(self._mooncake.register_memory(self._buffer.data_ptr(), self._bucket_bytes))
        self._source = source

    def reads(self, shape: str, root: str) -> float:
        """Read bucket after bucket with `transfer_sync_read`, from rank 0."""
        del shape, root
        dist.barrier()
        begin = time.monotonic()
        if self._rank:
            session, address = self._source
            target = self._buffer.data_ptr()
            for start, end in self._bounds():
                rc = self._mooncake.transfer_sync_read(
                    session, target, address + start, end - start
                )
                _check(rc)
        end = time.monotonic()
        dist.barrier()
        return begin if self._rank == 0 else end

    def files(self, shape: str, root: str) -> float:
        """Save, fsync, load, copy out."""
        path = Path(root) / "baseline.safetensors"
        dist.barrier()
        begin = time.monotonic()
        if self._rank == 0:
            save_file({meta.name: tensor for meta, tensor in self._weights[shape]}, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        dist.barrier()
        if self._rank:
            position = 0
            with safe_open(path, "pt") as file:
                for meta in self._weights[shape].metas:
                    data = as_bytes(file.get_tensor(meta.name))
                    self._data[position : position + data.numel()].copy_(data)
                    position += data.numel()
        end = time.monotonic()
        dist.barrier()
        if self._rank == 0:
            path.unlink()
        return begin if self._rank == 0 else end

    def _pack(self, shape: str, start: int, end: int) -> None:
        """Copy the tensors between two positions, one by one, as a packer would."""
        position = 0
        for meta in self._weights[shape].metas:
            low, high = max(start, position), min(end, position + meta.nbytes)
            if low < high:
                self._buffer[low - start : high - start].copy_(self._data[low:high])
            position += meta.nbytes

    def _bounds(self) -> list[tuple[int, int]]:
        total = self._data.numel()
        return list(pairwise([*range(0, total, self._bucket_bytes), total]))


def _take(arrived: tuple[torch.Tensor, torch.Tensor], look: Callable[[torch.Tensor], Any]) -> None:
    source, target = arrived
    look(source)
    target.copy_(source)


def _mooncake() -> Any:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    _check(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
    return engine


def _check(rc: int) -> None:
    if rc != 0:
        raise RuntimeError(f"Mooncake returned {rc}")
