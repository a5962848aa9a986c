"""The bucket buffers of one side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.torch import as_bytes  # first: it says what to install where torch is missing

# isort: split
import torch

from rl_core.transfer.transport import BUFFERS

if TYPE_CHECKING:
    from rl_core.transfer.plan import TransferPlan


class BucketBuffers:
    """`BUFFERS` flat uint8 tensors on one device, kept from sync to sync.

    The first write to fresh memory is many times slower than later ones, so buffers that are large
    enough are never given back between syncs.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._tensors: list[torch.Tensor] = []

    def fit(self, plan: TransferPlan) -> None:
        """Have as many and as large buffers as `plan` needs; a change loses their contents."""
        sizes = [plan.bucket_bytes] * min(BUFFERS, len(plan.buckets))
        if [tensor.numel() for tensor in self._tensors] == sizes:
            return
        self._tensors = []  # before the new ones are made
        self._tensors = [
            torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes
        ]

    def of(self, bucket: int) -> torch.Tensor:
        """The buffer in which bucket number `bucket` lives."""
        return self._tensors[bucket % BUFFERS]

    def drop(self) -> None:
        """Give the memory back; whoever still reads a buffer keeps it alive."""
        self._tensors = []


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy flat uint8 `source` to `target`, of equal length, on any devices.

    On the host the copy is numpy's: one thread, without the interpreter lock. Torch would spread
    it over an OpenMP pool, which on busy cores is slower by orders of magnitude and which only a
    process-wide setting, not ours to make, could limit.
    """
    if target.device.type == source.device.type == "cpu":
        target.numpy()[:] = source.numpy()
    else:
        target.copy_(source)


def flat_bytes(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Its elements in row-major order, as flat uint8 on `device`; copies only where it must."""
    data = as_bytes(tensor)
    return data if _on(data, device) else data.to(device)


def is_copied(tensor: torch.Tensor, device: str) -> bool:
    """Whether `flat_bytes` must copy."""
    return not (tensor.is_contiguous() and _on(tensor, device))


def _on(tensor: torch.Tensor, device: str) -> bool:
    return bool(tensor.device.type == torch.device(device).type)
