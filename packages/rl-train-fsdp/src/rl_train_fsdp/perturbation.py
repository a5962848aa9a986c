"""Published weights that are changed for a while, and put back bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.errors import LifecycleError
from rl_core.torch import dtype_of
from rl_train_fsdp.conversions import module_tensors
from rl_train_fsdp.optimizer import local
from rl_train_fsdp.wrapping import reshard

if TYPE_CHECKING:
    from rl_train_fsdp.policy import Policy


class Perturbation:
    """Changes this rank's shards of everything that is published, and keeps a copy. Local."""

    def __init__(self, policy: Policy, wire_dtype: str | None) -> None:
        """`wire_dtype` is what the weights are rounded to when they are published."""
        self._policy = policy
        self._wire = dtype_of(wire_dtype) if wire_dtype else torch.float32
        self._kept: dict[str, torch.Tensor] | None = None

    def apply(self, delta: float) -> None:
        """Add `delta` to every element, or one step of the published dtype, whichever is more.

        LifecycleError if they are changed already.
        """
        if self._kept is not None:
            raise LifecycleError("the weights are perturbed already; restore them first")
        shards = self._shards()
        self._kept = {name: shard.to("cpu", copy=True) for name, shard in shards.items()}
        with torch.no_grad():
            for shard in shards.values():
                shard.add_(_steps(shard, self._wire).clamp_(min=delta))

    def undo(self) -> None:
        """Put back what there was. Nothing to do if nothing was changed."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        with torch.no_grad():
            for name, shard in self._shards().items():
                shard.copy_(kept[name])

    def _shards(self) -> dict[str, torch.Tensor]:
        reshard(self._policy)
        tensors = module_tensors(self._policy.model)
        shards = {name: local(tensor.detach()) for name, tensor in tensors.items()}
        return {name: shard for name, shard in shards.items() if shard.is_floating_point()}


def _steps(values: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """For each value at least one step of the coarser one of its own dtype and `wire`."""
    coarser = max(torch.finfo(wire).eps, torch.finfo(values.dtype).eps)
    return values.abs().mul_(2 * coarser)
