"""Weights as a trainer publishes them, and the bucket leases in which a test hands them over."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec
import torch

from rl_core import digests
from rl_core.buckets import align
from rl_core.interfaces import BucketLease, LeasedTensor
from rl_core.metadata import Manifest, TensorMeta
from rl_core.torch import as_bytes, content_digest, from_bytes, meta_of
from rl_core.versions import PolicyVersion

POISON = 0xFF
"""Byte that fills a buffer once its lease is over; floats made of it are NaN."""


@dataclass(frozen=True)
class WeightSet:
    """One complete set of weights.

    Attributes:
        tensors: full tensors on the host under their Hugging Face names, in stream order.
        aliases: further names by tensor name (tied embeddings).
    """

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def metas(self) -> list[TensorMeta]:
        """Metadata of the tensors, in order."""
        return [
            msgspec.structs.replace(
                meta_of(name, tensor), aliases=tuple(self.aliases.get(name, ()))
            )
            for name, tensor in self.tensors.items()
        ]

    def manifest(self, version: PolicyVersion, run_id: str = "contract") -> Manifest:
        """The manifest of these tensors as `version`."""
        return Manifest(version, tuple(self.metas), run_id)

    def ordered(self, names: Sequence[str]) -> "WeightSet":
        """The same weights in another stream order."""
        return replace(self, tensors={name: self.tensors[name] for name in names})

    def changed(self, changes: Mapping[str, torch.Tensor]) -> "WeightSet":
        """A copy with tensors replaced or added."""
        return replace(self, tensors={**self.tensors, **changes})

    def without(self, name: str) -> "WeightSet":
        """A copy that lacks one tensor."""
        tensors = {key: tensor for key, tensor in self.tensors.items() if key != name}
        return replace(self, tensors=tensors)

    def blended(self, other: "WeightSet") -> "WeightSet":
        """Halfway between two sets; like neither of them in any floating-point tensor."""
        return self.changed(
            {
                name: ((tensor.float() + other.tensors[name].float()) / 2).to(tensor.dtype)
                for name, tensor in self.tensors.items()
                if tensor.is_floating_point()
            }
        )

    def filled(self, value: float) -> "WeightSet":
        """A copy with every floating-point element set to `value`."""
        return replace(
            self,
            tensors={
                name: torch.full_like(tensor, value) if tensor.is_floating_point() else tensor
                for name, tensor in self.tensors.items()
            },
        )

    @property
    def weights_digest(self) -> str:
        """Digest of digests (`xxh3-128`) that a light verification finds."""
        return digests.digest_of_digests(
            {meta.name: content_digest(meta, self.tensors[meta.name]) for meta in self.metas}
        )

    def entries(self) -> list[LeasedTensor]:
        """Every tensor with its digest, in order."""
        return [
            LeasedTensor(meta, tensor, content_digest(meta, tensor))
            for meta, tensor in zip(self.metas, self.tensors.values(), strict=True)
        ]


def leases(entries: Sequence[LeasedTensor], per_bucket: int | None = None) -> Iterator[BucketLease]:
    """Lend tensors out of one buffer that is used again for every bucket.

    After each lease the buffer is filled with `POISON`, so that whoever still reads it shows.

    Args:
        entries: in stream order.
        per_bucket: tensors in each bucket; None puts all into one.
    """
    groups = list(_groups(entries, per_bucket or max(1, len(entries))))
    size = max((sum(align(_nbytes(entry)) for entry in group) for group in groups), default=0)
    buffer = torch.empty(size, dtype=torch.uint8)
    for group in groups:
        lent, offset = [], 0
        for entry in group:
            slot = buffer[offset : offset + _nbytes(entry)]
            slot.copy_(as_bytes(entry.tensor))
            lent.append(replace(entry, tensor=from_bytes(slot, meta_of("", entry.tensor))))
            offset += align(_nbytes(entry))
        yield BucketLease(lent, lambda: buffer.fill_(POISON))


def _nbytes(entry: LeasedTensor) -> int:
    return meta_of(entry.meta.name, entry.tensor).nbytes


def _groups(entries: Sequence[LeasedTensor], size: int) -> Iterator[list[LeasedTensor]]:
    rest = iter(entries)
    while group := list(islice(rest, size)):
        yield group
