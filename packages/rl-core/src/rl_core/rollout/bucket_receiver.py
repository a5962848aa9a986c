"""The engine worker's end of a weight stream: yields whole tensors, bucket by bucket."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from rl_core.channel import connect
from rl_core.deadlines import Deadline
from rl_core.errors import ManifestMismatchError, MessageError, TransferError
from rl_core.metadata import Manifest, ManifestCheck, TensorMeta, Trailer
from rl_core.rollout.buffers import receive_buffers
from rl_core.rollout.protocol import (
    AbortStream,
    Ack,
    Bucket,
    CloseStream,
    FromAdapter,
    FromSocket,
    OpenStream,
    Piece,
)
from rl_core.torch import from_bytes


@dataclass(frozen=True)
class Arrival:
    """A whole tensor that has come.

    Attributes:
        meta: what it is.
        tensor: its values.
        digest: content digest computed at the source, or None.
        lent: whether the values lie in a transfer buffer that will be overwritten.
    """

    meta: TensorMeta
    tensor: torch.Tensor
    digest: str | None
    lent: bool


class BucketReceiver:
    """Reads one version from an adapter's stream.

    A buffer is given back when the caller asks for the next batch, not before.
    """

    def __init__(self, source: FromSocket, manifest: Manifest, deadline: Deadline) -> None:
        self._deadline = deadline
        self._check = ManifestCheck(manifest)
        self._manifest = manifest
        self._partial: _Partial | None = None
        self._channel = connect(source.address, source.key, FromAdapter, deadline)
        self.wire_seconds = 0.0

    def batches(self) -> Iterator[Sequence[Arrival]]:
        """The tensors of each bucket, until the trailer was seen and agreed.

        Errors: ManifestMismatchError (unknown, repeated, missing or malformed tensor, short
        stream), MessageError, TransferError, TransferTimeoutError.
        """
        opening = self._next()
        if not isinstance(opening, OpenStream):
            raise MessageError(f"a stream begins with OpenStream, not {type(opening).__name__}")
        buffers = receive_buffers(opening, self._channel, self._deadline)
        try:
            yield from self._buckets(buffers.tensors)
        finally:
            buffers.close()

    def _buckets(self, tensors: Sequence[torch.Tensor]) -> Iterator[Sequence[Arrival]]:
        number = 0
        while isinstance(message := self._next(), Bucket):
            if message.number != number or not 0 <= message.buffer < len(tensors):
                msg = f"bucket {message.number} in buffer {message.buffer}, expected {number}"
                raise MessageError(msg)
            data = tensors[message.buffer]
            arrivals = [self._take(piece, data) for piece in message.pieces]
            yield [arrival for arrival in arrivals if arrival is not None]
            self._channel.send(Ack(number), self._deadline)
            number += 1
        if not isinstance(message, CloseStream):
            raise MessageError(f"unexpected {type(message).__name__} in a stream")
        self._close(message.trailer)

    def _next(self) -> object:
        started = time.perf_counter()
        message = self._channel.receive(self._deadline)
        self.wire_seconds += time.perf_counter() - started
        if isinstance(message, AbortStream):
            raise TransferError(f"the sending side gave up: {message.reason}")
        return message

    def _take(self, piece: Piece, data: torch.Tensor) -> Arrival | None:
        """The tensor that this piece completes, if it does."""
        meta, slot = piece.meta, piece.slot
        if slot.offset + slot.nbytes > data.numel():
            msg = f"tensor {meta.name!r} reaches beyond its bucket"
            raise ManifestMismatchError(msg)
        run = data[slot.offset : slot.offset + slot.nbytes]
        if slot.start == 0:
            self._begin(meta)
            if slot.nbytes == meta.nbytes:
                return Arrival(meta, from_bytes(run, meta), piece.digest, lent=True)
            self._partial = _Partial(meta, run.device)
        if self._partial is None:
            raise ManifestMismatchError(f"a piece of {meta.name!r} came before its beginning")
        if not self._partial.add(piece, run):
            return None
        whole = self._partial.data
        self._partial = None
        return Arrival(meta, from_bytes(whole, meta), piece.digest, lent=False)

    def _begin(self, meta: TensorMeta) -> None:
        if self._partial is not None:
            msg = f"tensor {meta.name!r} began before {self._partial.meta.name!r} was complete"
            raise ManifestMismatchError(msg)
        self._check.see(meta)

    def _close(self, trailer: Trailer) -> None:
        if self._partial is not None:
            msg = f"the stream ended inside tensor {self._partial.meta.name!r}"
            raise ManifestMismatchError(msg)
        self._check.close()
        trailer.check(self._manifest)

    def __enter__(self) -> "BucketReceiver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()


class _Partial:
    """A tensor larger than a bucket, being joined."""

    def __init__(self, meta: TensorMeta, device: torch.device) -> None:
        self.meta = meta
        self.data = torch.empty(meta.nbytes, dtype=torch.uint8, device=device)
        self._filled = 0

    def add(self, piece: Piece, run: torch.Tensor) -> bool:
        """Append a run of bytes; whether the tensor is now complete."""
        start, nbytes = piece.slot.start, piece.slot.nbytes
        if piece.meta != self.meta or start != self._filled:
            msg = f"a piece of {piece.meta.name!r} is out of place inside {self.meta.name!r}"
            raise ManifestMismatchError(msg)
        if start + nbytes > self.data.numel():
            raise ManifestMismatchError(f"pieces of {self.meta.name!r} exceed its size")
        self.data[start : start + nbytes].copy_(run)
        self._filled += nbytes
        return self._filled == self.meta.nbytes
