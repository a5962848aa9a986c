"""The adapter's end of a weight stream: packs leased tensors into buckets and sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.buckets import BucketCursor, Slot, align, bucket_bytes
from rl_core.errors import ManifestMismatchError, MessageError
from rl_core.metadata import Manifest, ManifestCheck, TensorMeta
from rl_core.rollout.buffers import Buffers, create_buffers
from rl_core.rollout.protocol import AbortStream, Ack, Bucket, CloseStream, Piece
from rl_core.torch import as_bytes, dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rl_core.channel import Channel
    from rl_core.deadlines import Deadline
    from rl_core.interfaces import BucketLease, LeasedTensor


class BufferPool:
    """Keeps the buffers from one sync to the next: touching new pages costs more than copying."""

    def __init__(self, megabytes: float) -> None:
        self._megabytes = megabytes
        self._buffers: Buffers | None = None

    def get(self, manifest: Manifest, device: torch.device) -> Buffers:
        """One buffer if the payload fits into it, else two.

        Errors: TransferError if there is no memory for them.
        """
        nbytes = bucket_bytes(self._megabytes, manifest.tensors)
        payload = sum(align(meta.nbytes) for meta in manifest.tensors)
        count = 1 if payload <= nbytes else 2
        held = self._buffers
        if held is not None and (held.nbytes, len(held.tensors)) == (nbytes, count):
            return held
        self.close()
        self._buffers = create_buffers(count, nbytes, device)
        return self._buffers

    def close(self) -> None:
        """Free the buffers. Idempotent."""
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None


class BucketSender:
    """Streams one version to one engine rank."""

    def __init__(
        self, channel: Channel, manifest: Manifest, pool: BufferPool, deadline: Deadline
    ) -> None:
        self._channel = channel
        self._manifest = manifest
        self._pool = pool
        self._deadline = deadline
        self._check = ManifestCheck(manifest)
        self._number = 0
        self._acked = 0
        self._pieces: list[Piece] = []

    def send(self, leases: Iterable[BucketLease]) -> None:
        """Send everything and the trailer; the leases are consumed to their end.

        Errors: ManifestMismatchError (the stream is not what was announced), TransferError (the
        worker went away), TransferTimeoutError.
        """
        opened = False
        for lease in leases:
            with lease as entries:
                for entry in entries:
                    if not opened:
                        self._open(entry.tensor.device)
                        opened = True
                    self._pack(entry)
        if not opened:
            self._open(torch.device("cpu"))
        self._flush()
        while self._acked < self._number:
            self._await_ack()
        self._channel.send(CloseStream(self._check.close()), self._deadline)

    def abort(self, reason: str) -> None:
        """Tell the worker why no more comes."""
        self._channel.send(AbortStream(reason), self._deadline)

    def _open(self, device: torch.device) -> None:
        self._buffers = self._pool.get(self._manifest, device)
        self._cursor = BucketCursor(self._buffers.nbytes)
        self._buffers.offer(self._channel, self._deadline)

    def _pack(self, entry: LeasedTensor) -> None:
        meta = entry.meta
        self._check.see(meta)
        _check_tensor(meta, entry.tensor)
        data = as_bytes(entry.tensor)
        for slot in self._cursor.slots(meta.nbytes):
            if slot.bucket != self._number:
                self._flush()
            self._write(slot, data)
            self._pieces.append(Piece(meta, slot, entry.digest))

    def _write(self, slot: Slot, data: torch.Tensor) -> None:
        target = self._buffers.tensors[self._number % len(self._buffers.tensors)]
        run = data[slot.start : slot.start + slot.nbytes]
        target[slot.offset : slot.offset + slot.nbytes].copy_(run)

    def _flush(self) -> None:
        """Hand over the bucket being filled; then wait until the next buffer is free."""
        if not self._pieces:
            return
        self._buffers.fence()
        count = len(self._buffers.tensors)
        bucket = Bucket(self._number, self._number % count, tuple(self._pieces))
        self._channel.send(bucket, self._deadline)
        self._pieces = []
        self._number += 1
        while self._number - self._acked >= count:
            self._await_ack()

    def _await_ack(self) -> None:
        ack: Ack = self._channel.receive(self._deadline)
        if ack.number != self._acked:
            raise MessageError(f"bucket {ack.number} was acknowledged, expected {self._acked}")
        self._acked += 1


def _check_tensor(meta: TensorMeta, tensor: torch.Tensor) -> None:
    if tuple(tensor.shape) != meta.shape or tensor.dtype is not dtype_of(meta.dtype):
        msg = f"tensor {meta.name!r} is {tuple(tensor.shape)} {tensor.dtype}, announced as {meta}"
        raise ManifestMismatchError(msg)
