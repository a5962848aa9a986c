"""One weight update of the reference engine, over all ranks of a replica."""

import asyncio
from collections.abc import Sequence

import torch

from rl_core.errors import (
    LifecycleError,
    ManifestMismatchError,
    StaleVersionError,
    TransferTimeoutError,
    VerificationError,
    WeightSyncError,
)
from rl_core.metadata import Manifest, ManifestCheck, TensorMeta
from rl_core.testing.reference_model import RankModel


class Update:
    """Loads one version into the ranks of a replica; lives on the server's event loop.

    Attributes:
        manifest: what the first rank announced.
        attempt: number of this update in the life of the server; messages carry it.
    """

    def __init__(self, manifest: Manifest, attempt: int, ranks: Sequence[RankModel]) -> None:
        self.manifest = manifest
        self.attempt = attempt
        self._ranks = ranks
        self._checks: dict[int, ManifestCheck] = {}
        self._closed: set[int] = set()
        self._loaded = asyncio.Event()
        self._failure = ""

    def admit(self, rank: int, manifest: Manifest) -> None:
        """Refuse a second sender of a rank (LifecycleError), or of another version."""
        if manifest.version != self.manifest.version:
            msg = f"version {manifest.version} is refused: {self.manifest.version} is under way"
            raise StaleVersionError(msg)
        if rank in self._checks:
            msg = f"rank {rank} is already being updated to {manifest.version} by another sender"
            raise LifecycleError(msg)

    def join(self, rank: int, manifest: Manifest) -> None:
        """Open one rank's stream; ManifestMismatchError if it is not for this model."""
        self.manifest.check_same_structure(manifest)
        self._ranks[rank].check(manifest)
        self._ranks[rank].begin()
        self._checks[rank] = ManifestCheck(manifest)

    def load(self, rank: int, attempt: int, meta: TensorMeta, tensor: torch.Tensor) -> None:
        """Put one whole tensor in its place in one rank."""
        self.require(rank, attempt)
        self._checks[rank].see(meta)
        self._ranks[rank].load(meta.name, tensor)

    def close(self, rank: int) -> bool:
        """End one rank's stream; after the last one post-process all ranks and give True."""
        self._checks[rank].close()
        self._closed.add(rank)
        if len(self._closed) < len(self._ranks):
            return False
        for model in self._ranks:
            model.finish()
            _require_finite(model, self.manifest)
        self._loaded.set()
        return True

    def fail(self, reason: str) -> None:
        """End the update, for ranks that wait too."""
        self._failure = self._failure or reason
        self._loaded.set()

    async def wait(self, rank: int, limit_s: float) -> None:
        """Until all ranks are loaded. WeightSyncError if another one failed, or timed out."""
        try:
            async with asyncio.timeout(limit_s):
                await self._loaded.wait()
        except TimeoutError as error:
            msg = f"deadline passed while rank {rank} waited for the other ranks to load"
            raise TransferTimeoutError(msg) from error
        self._check_failure()

    def _check_failure(self) -> None:
        if self._failure:
            msg = f"the update to {self.manifest.version} ended: {self._failure}"
            raise WeightSyncError(msg)

    def require(self, rank: int, attempt: int) -> None:
        """Refuse a message of another update, or of a rank whose stream is not open."""
        self._check_failure()
        if attempt != self.attempt or rank not in self._checks:
            msg = f"message of update {attempt}, rank {rank}: update {self.attempt} is under way"
            raise StaleVersionError(msg)
        if rank in self._closed:
            raise ManifestMismatchError(f"rank {rank} goes on after the end of its stream")


def _require_finite(model: RankModel, manifest: Manifest) -> None:
    for name, tensor in model.parameters.items():
        if not tensor.isfinite().all():
            msg = f"{name!r} of rank {model.tp_rank} is not finite in version {manifest.version}"
            raise VerificationError(msg)
