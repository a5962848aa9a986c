"""The frozen reference policy: this rank's shards as they were at the start."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from rl_train_fsdp.optimizer import local
from rl_train_fsdp.wrapping import reshard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class Reference:
    """A copy of the parameters that can take the policy's place for a while.

    It costs a second copy of this rank's float32 shards, kept in host memory. There is no second
    module: the reference is computed by the policy's own, so both agree bit for bit as long as
    the policy was not trained.
    """

    def __init__(self, policy: nn.Module) -> None:
        """Copy the shards. Local."""
        self._policy = policy
        self._copies = {
            name: local(parameter.detach()).to("cpu", copy=True)
            for name, parameter in policy.named_parameters()
        }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The policy computes with the reference's values in the block, then with its own again.

        Local, but every rank has to be inside before any computes.
        """
        kept = self._exchange(self._copies)
        try:
            yield
        finally:
            self._exchange(kept)

    def _exchange(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Write `values` into the shards; the values that were there."""
        reshard(self._policy)
        before = {}
        with torch.no_grad():
            for name, parameter in self._policy.named_parameters():
                shard = local(parameter.detach())
                before[name] = shard.clone()
                shard.copy_(values[name])
        return before
