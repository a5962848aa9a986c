"""Receiver: from the bytes of buckets to whole tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.torch import from_bytes  # first: it says what to install where torch is missing

# isort: split
import torch

from rl_core.digests import digest_of_digests, kind_of
from rl_core.errors import ManifestMismatchError, MessageError, VerificationError
from rl_core.interfaces import LeasedTensor
from rl_core.metadata import ManifestCheck
from rl_core.transfer.buffers import copy_bytes

if TYPE_CHECKING:
    from rl_core.metadata import Manifest, TensorMeta, Trailer
    from rl_core.transfer.messages import BucketEntry, BucketReady
    from rl_core.transfer.plan import Part, TransferPlan


class JoinBuffer:
    """Memory in which tensors larger than a bucket are put together; kept from sync to sync."""

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None

    def of(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Flat uint8 memory of `nbytes`."""
        if self._tensor is None or self._tensor.numel() < nbytes or self._tensor.device != device:
            self._tensor = None
            self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._tensor[:nbytes]

    def fit(self, nbytes: int) -> None:
        """Give the memory back unless it is of use for tensors of up to `nbytes`."""
        if self._tensor is not None and self._tensor.numel() > nbytes:
            self._tensor = None


class Unpacker:
    """Views of the whole tensors in each bucket, in stream order.

    Digests are passed on, not recomputed: that is for the last point before loading.
    """

    def __init__(
        self, plan: TransferPlan, manifest: Manifest, digest_kind: str | None, join: JoinBuffer
    ) -> None:
        self._plan = plan
        self._manifest = manifest
        self._kind = digest_kind
        self._join = join
        join.fit(plan.joined_bytes)
        self._check = ManifestCheck(manifest)
        self._digests: dict[str, str] = {}

    def open(self, announced: BucketReady, buffer: torch.Tensor) -> list[LeasedTensor]:
        """The tensors that are whole with this bucket.

        Args:
            announced: its contents; whatever departs from the plan is a MessageError.
            buffer: flat uint8, at least as long as the bucket.
        """
        parts = self._plan.buckets[announced.bucket].parts
        names = [(part.meta.name, part.slot) for part in parts]
        if names != [(entry.name, entry.slot) for entry in announced.entries]:
            msg = f"the contents announced for bucket {announced.bucket} are not those planned"
            raise MessageError(msg)
        leased = []
        for part, entry in zip(parts, announced.entries, strict=True):
            data = buffer[part.slot.offset : part.slot.offset + part.slot.nbytes]
            if not (part.first and part.last):
                data = self._joined(part, data)
            if part.last:
                leased.append(self._whole(part.meta, data, entry))
        return leased

    def close(self, trailer: Trailer) -> None:
        """Compare what came with the trailer.

        Errors: ManifestMismatchError (count, bytes, version), VerificationError (digest of
        digests).
        """
        self._check.close()
        trailer.check(self._manifest)
        found = digest_of_digests(self._digests) if self._kind else None
        if found != trailer.weights_digest:
            msg = (
                f"the digests that came with version {trailer.version} add up to {found}, the "
                f"sender's to {trailer.weights_digest}"
            )
            raise VerificationError(msg)

    def _joined(self, part: Part, data: torch.Tensor) -> torch.Tensor:
        whole = self._join.of(self._plan.joined_bytes, data.device)[: part.meta.nbytes]
        copy_bytes(whole[part.slot.start : part.slot.start + part.slot.nbytes], data)
        return whole

    def _whole(self, meta: TensorMeta, data: torch.Tensor, entry: BucketEntry) -> LeasedTensor:
        self._check.see(meta)
        if (kind_of(entry.digest) if entry.digest else None) != self._kind:
            msg = f"tensor {meta.name!r} came with digest {entry.digest}, agreed was {self._kind}"
            raise ManifestMismatchError(msg)
        if entry.digest:
            self._digests[meta.name] = entry.digest
        return LeasedTensor(meta, from_bytes(data, meta), entry.digest)
