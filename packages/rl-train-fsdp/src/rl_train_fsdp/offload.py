"""Parameters and optimizer state in host memory while the rollout engine has the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_train_fsdp.wrapping import reshard

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rl_train_fsdp.config import EngineConfig
    from rl_train_fsdp.optimizer import ShardedAdamW


class Offload:
    """Moves what the configuration names off the device and back. Local on each rank."""

    def __init__(
        self,
        policy: nn.Module,
        optimizer: ShardedAdamW,
        config: EngineConfig,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._config = config
        self._device = device
        self._say = say
        self._told = False
        self.active = False
        """Whether something is off the device now."""

    def offload(self) -> None:
        """Free device memory. Idempotent; on cpu there is nothing to free, said once."""
        reshard(self._policy)
        if self._wanted() and not self.active:
            self._move(torch.device("cpu"))
            self.active = True

    def onload(self) -> None:
        """Bring everything back. Idempotent."""
        if self.active:
            self._move(self._device)
            self.active = False

    def _wanted(self) -> bool:
        wanted = self._config.param_offload or self._config.optimizer_offload
        if wanted and self._device.type == "cpu":
            if not self._told:
                self._say("Offload not applicable: device=cpu, parameters are in host memory")
                self._told = True
            return False
        return wanted

    def _move(self, device: torch.device) -> None:
        if self._config.param_offload:
            self._optimizer.zero_grad()
            self._policy.to(device)
        if self._config.optimizer_offload:
            self._optimizer.to(device)
        if device.type == "cpu":
            getattr(torch, self._device.type).empty_cache()
