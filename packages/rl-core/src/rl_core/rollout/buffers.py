"""Transfer buffers that two processes see: shared memory on a host, CUDA IPC on a device.

The adapter creates them and fills them; the engine's worker maps them and reads. The CUDA half is
thin and typed, and has never run on hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from rl_core.errors import TransferError
from rl_core.rollout.protocol import OpenStream
from rl_core.shared_memory import SharedBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.channel import Channel
    from rl_core.deadlines import Deadline


class Buffers(Protocol):
    """The buffers of a stream, as flat uint8 tensors of `nbytes` each."""

    nbytes: int

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """One tensor per buffer."""
        ...

    def offer(self, channel: Channel, deadline: Deadline) -> None:
        """Let the peer map them (adapter's side)."""
        ...

    def fence(self) -> None:
        """Wait until everything written or read so far is done on the device."""
        ...

    def close(self) -> None:
        """Give up this process's hold."""
        ...


class SharedMemoryBuffers:
    """Anonymous shared memory; the descriptors travel over the Unix socket."""

    def __init__(self, shared: list[SharedBuffer]) -> None:
        self._shared = shared
        self.nbytes = shared[0].nbytes
        self._tensors = [torch.frombuffer(item.view, dtype=torch.uint8) for item in shared]

    @classmethod
    def create(cls, count: int, nbytes: int) -> SharedMemoryBuffers:
        """Allocate `count` buffers; TransferError if there is no memory."""
        return cls([SharedBuffer.create(nbytes, "rl-rollout") for _ in range(count)])

    @classmethod
    def receive(cls, opening: OpenStream, channel: Channel, deadline: Deadline) -> Buffers:
        """Map the peer's buffers (worker's side)."""
        count, nbytes = opening.buffers, opening.nbytes
        return cls([SharedBuffer(channel.receive_fd(deadline), nbytes) for _ in range(count)])

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """One tensor per buffer."""
        return self._tensors

    def offer(self, channel: Channel, deadline: Deadline) -> None:
        """Send the opening message, then the descriptors."""
        channel.send(OpenStream(len(self._shared), self.nbytes, "memfd"), deadline)
        for item in self._shared:
            channel.send_fd(item.fd, deadline)

    def fence(self) -> None:
        """Nothing to wait for: host memory is written synchronously."""

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._tensors = []
        for item in self._shared:
            item.close()


class CudaHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What `torch.UntypedStorage._share_cuda_` gives, in its order."""

    device: int
    handle: bytes
    nbytes: int
    offset: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class CudaBuffers:
    """Device memory shared by CUDA IPC. Never run: no CUDA hardware was at hand."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.nbytes = tensors[0].numel()

    @classmethod
    def create(cls, count: int, nbytes: int, device: torch.device) -> CudaBuffers:
        """Allocate `count` buffers on `device`."""
        return cls([torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)])

    @classmethod
    def receive(cls, opening: OpenStream) -> Buffers:
        """Map the peer's buffers (worker's side)."""
        tensors = []
        for encoded in opening.handles:
            handle = msgspec.msgpack.decode(encoded, type=CudaHandle)
            storage = torch.UntypedStorage._new_shared_cuda(*msgspec.structs.astuple(handle))
            tensors.append(torch.tensor([], dtype=torch.uint8, device="cuda").set_(storage))
        return cls(tensors)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """One tensor per buffer."""
        return self._tensors

    def offer(self, channel: Channel, deadline: Deadline) -> None:
        """Send the opening message with the handles."""
        handles = tuple(
            msgspec.msgpack.encode(CudaHandle(*tensor.untyped_storage()._share_cuda_()))
            for tensor in self._tensors
        )
        channel.send(OpenStream(len(handles), self.nbytes, "cuda", handles), deadline)

    def fence(self) -> None:
        """Wait for the device: a bucket is complete only after the copies into it."""
        torch.cuda.synchronize(self._tensors[0].device)

    def close(self) -> None:
        """Drop the tensors; the sender's allocation goes with its last holder."""
        self._tensors = []


def create_buffers(count: int, nbytes: int, device: torch.device) -> Buffers:
    """Buffers for tensors that live on `device` (adapter's side)."""
    if device.type == "cuda":
        return CudaBuffers.create(count, nbytes, device)
    return SharedMemoryBuffers.create(count, nbytes)


def receive_buffers(opening: OpenStream, channel: Channel, deadline: Deadline) -> Buffers:
    """Map what the adapter offers (worker's side); TransferError if it cannot be."""
    try:
        if opening.kind == "cuda":
            return CudaBuffers.receive(opening)
        return SharedMemoryBuffers.receive(opening, channel, deadline)
    except (OSError, RuntimeError, ValueError) as error:
        raise TransferError(f"cannot map the adapter's buffers: {error}") from error
