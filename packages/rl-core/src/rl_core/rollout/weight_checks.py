"""What an engine worker checks of every tensor, just before it is loaded."""

import logging

import torch

from rl_core.digests import check, digest_of_digests, kind_of, same
from rl_core.errors import ManifestMismatchError, VerificationError
from rl_core.interfaces import LeasedTensor, LoadReport
from rl_core.metadata import Manifest
from rl_core.rollout.bucket_receiver import Arrival
from rl_core.tensor_counts import TensorCounts
from rl_core.torch import content_digest

logger = logging.getLogger(__name__)


def check_supported(manifest: Manifest) -> None:
    """ManifestMismatchError if the version holds what this package cannot load."""
    for meta in manifest.tensors:
        if meta.target != "policy" or meta.quantisation is not None:
            msg = (
                f"tensor {meta.name!r} (target={meta.target}, quantisation={meta.quantisation}): "
                "only plain tensors of the policy can be loaded"
            )
            raise ManifestMismatchError(msg)


class ArrivalChecks:
    """Digests and finiteness of the tensors of one version, counted."""

    def __init__(self, manifest: Manifest, *, check_finite: bool) -> None:
        self._manifest = manifest
        self._check_finite = check_finite
        self._digests: dict[str, str] = {}
        self._seen: dict[str, int] = {}
        self._mismatched = 0
        self.nbytes = 0

    def see(self, arrival: Arrival | LeasedTensor) -> None:
        """Check one tensor.

        Errors: DigestMismatchError, VerificationError for a value that is not finite; both name
        the tensor.
        """
        meta = arrival.meta
        self._seen[meta.name] = self._seen.get(meta.name, 0) + 1
        self.nbytes += meta.nbytes
        if arrival.digest is not None:
            found = content_digest(meta, arrival.tensor, kind_of(arrival.digest))
            self._mismatched += not same(arrival.digest, found)
            check(meta.name, arrival.digest, found)
            self._digests[meta.name] = found
        if self._check_finite and not finite(arrival.tensor):
            raise VerificationError(f"tensor {meta.name!r} contains values that are not finite")

    @property
    def tensors(self) -> int:
        """Tensors that came."""
        return sum(self._seen.values())

    @property
    def matched(self) -> int:
        """Tensors whose digest was recomputed and agreed."""
        return len(self._digests)

    @property
    def so_far(self) -> TensorCounts:
        """Counts of the tensors that came, in the middle of a version: none is missing yet."""
        unexpected = sum(
            times - (name in self._manifest.by_name) for name, times in self._seen.items()
        )
        unverifiable = self.tensors - self.matched - self._mismatched
        return TensorCounts(self.matched, self._mismatched, 0, unexpected, unverifiable)

    @property
    def weights_digest(self) -> str | None:
        """Digest of the recomputed digests, or None unless every tensor had one."""
        if not self._digests or self.matched < self.tensors:
            return None
        return digest_of_digests(self._digests)

    def report(self, seconds: dict[str, float]) -> LoadReport:
        """What came, at the end of the version; `seconds` by phase."""
        counts = self.so_far
        return LoadReport(
            self._manifest.version,
            self.tensors,
            self.nbytes,
            seconds,
            self.matched,
            self.weights_digest,
            counts.mismatched,
            len(self._manifest.by_name.keys() - self._seen.keys()),
            counts.unexpected,
        )


def finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite.

    A sum passes NaN and infinity on and is several times cheaper than testing every element; only
    a sum that is not finite (it may have overflowed) is looked at closely.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)
    total = tensor.sum(dtype=torch.float32 if tensor.element_size() <= 4 else None)
    return bool(total.isfinite()) or bool(tensor.isfinite().all())
