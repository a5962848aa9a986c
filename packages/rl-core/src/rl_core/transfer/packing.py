"""Sender: from a stream of tensors to the segments of buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from rl_core.digests import digest_of_digests
from rl_core.errors import ManifestMismatchError
from rl_core.metadata import ManifestCheck
from rl_core.torch import content_digest, meta_of
from rl_core.transfer.buffers import copy_bytes, flat_bytes, is_copied
from rl_core.transfer.messages import BucketEntry

if TYPE_CHECKING:
    import torch

    from rl_core.interfaces import TensorStream
    from rl_core.metadata import Manifest, TensorMeta, Trailer
    from rl_core.transfer.phases import Phases
    from rl_core.transfer.plan import BucketPlan, Part, Segment, TransferPlan
    from rl_core.transfer.transport import Outlet


class Announcer(Protocol):
    """The control plane, as the packer sees it."""

    def admit(self, bucket: int) -> None:
        """Wait until bucket number `bucket` may be filled."""

    def announce(self, bucket: int, entries: tuple[BucketEntry, ...]) -> None:
        """Tell the receivers what is in a bucket whose segments were all started."""


class Packer:
    """Draws tensors from a stream, in the order of the manifest, and hands segments to an outlet.

    Small tensors are copied into the bucket's buffer; a large contiguous one is sent from its own
    storage, and the stream goes on once that was read. Digests are of the tensors as drawn, before
    any packing; that of a large tensor is computed while its bytes are on their way. A tensor that
    must be copied before it is packed has its digest before that: it may take a copy itself.
    """

    def __init__(
        self,
        plan: TransferPlan,
        manifest: Manifest,
        digest_kind: str | None,
        outlet: Outlet,
        phases: Phases,
    ) -> None:
        """`phases` has `gather`, `pack`, `wire` and `ack`."""
        self._plan = plan
        self._check = ManifestCheck(manifest)
        self._kind = digest_kind
        self._outlet = outlet
        self._phases = phases
        self._digests: dict[str, str] = {}
        self._tensor: torch.Tensor | None = None
        self._data: torch.Tensor | None = None
        self._digest: str | None = None
        self._lent = False

    def pack(self, weights: TensorStream, announcer: Announcer) -> Trailer:
        """Send the whole stream.

        Errors: ManifestMismatchError naming a tensor that is unknown, repeated, missing, out of
        order or of another shape or dtype; whatever the stream, the outlet or `announcer` raises.
        """
        for bucket in self._plan.buckets:
            with self._phases("ack"):
                announcer.admit(bucket.number)
            entries = self._fill(bucket, weights)
            announcer.announce(bucket.number, entries)
        self._settle()
        for meta, _ in weights:
            self._check.see(meta)
        trailer = self._check.close()
        digest = digest_of_digests(self._digests) if self._kind else None
        return msgspec.structs.replace(trailer, weights_digest=digest)

    def _fill(self, bucket: BucketPlan, weights: TensorStream) -> tuple[BucketEntry, ...]:
        entries: list[BucketEntry] = []
        with self._phases("wire"):
            self._outlet.open_bucket(bucket.number)
        for segment in bucket.segments:
            if segment.direct:
                entries.append(self._direct(segment, weights))
            else:
                entries += self._packed(segment, weights)
        self._outlet.close_bucket(bucket.number)
        return tuple(entries)

    def _packed(self, segment: Segment, weights: TensorStream) -> list[BucketEntry]:
        with self._phases("wire"):
            buffer = self._outlet.buffer(segment.bucket)
        entries = []
        for part in segment.parts:
            if part.first:
                self._draw(part, weights)
            with self._phases("pack"):
                entries.append(self._entry(part))
                end = part.slot.offset + part.slot.nbytes
                copy_bytes(buffer[part.slot.offset : end], self._bytes_of(part))
        if segment.nbytes:
            data = buffer[segment.offset : segment.offset + segment.nbytes]
            self._outlet.start(segment, data)
        return entries

    def _direct(self, segment: Segment, weights: TensorStream) -> BucketEntry:
        part = segment.parts[0]
        if part.first:
            self._draw(part, weights)
        with self._phases("pack"):
            self._outlet.start(segment, self._bytes_of(part))
        self._lent = True
        with self._phases("pack"):
            return self._entry(part)

    def _draw(self, part: Part, weights: TensorStream) -> None:
        """Take the next tensor from the stream; the previous one is no longer valid then."""
        self._settle()
        self._tensor = self._data = self._digest = None
        with self._phases("gather"):
            drawn = next(weights, None)
        if drawn is None:
            self._check.close()
            msg = f"the stream ended before tensor {part.meta.name!r}"
            raise ManifestMismatchError(msg)
        meta, self._tensor = drawn
        self._check.see(meta)
        _check_tensor(part.meta, meta, self._tensor)

    def _settle(self) -> None:
        if self._lent:
            with self._phases("wire"):
                self._outlet.settle()
            self._lent = False

    def _bytes_of(self, part: Part) -> torch.Tensor:
        if self._data is None:
            assert self._tensor is not None, "drawn with the first part of the tensor"
            if is_copied(self._tensor, self._outlet.device):
                self._digest_of(part)
            self._data = flat_bytes(self._tensor, self._outlet.device)
        return self._data[part.slot.start : part.slot.start + part.slot.nbytes]

    def _entry(self, part: Part) -> BucketEntry:
        """The part's announcement; with the last one comes the digest of the whole tensor."""
        digest = self._digest_of(part) if part.last else None
        return BucketEntry(part.meta.name, part.slot, digest)

    def _digest_of(self, part: Part) -> str | None:
        """Of the whole tensor as drawn."""
        if self._kind and self._digest is None and self._tensor is not None:
            self._digest = content_digest(part.meta, self._tensor, self._kind)
            self._digests[part.meta.name] = self._digest
        return self._digest


def _check_tensor(planned: TensorMeta, meta: TensorMeta, tensor: torch.Tensor) -> None:
    if meta.name != planned.name:
        msg = (
            f"tensor {meta.name!r} came out of order: the manifest has {planned.name!r} here; "
            "list the tensors in the manifest in the order of the stream"
        )
        raise ManifestMismatchError(msg)
    real = meta_of(meta.name, tensor)
    if (real.shape, real.dtype) != (meta.shape, meta.dtype):
        msg = f"tensor {meta.name!r} is {real.shape} {real.dtype}, announced as {meta}"
        raise ManifestMismatchError(msg)
