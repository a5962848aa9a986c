"""Options of the hccl checkpoint engine."""

import math
from dataclasses import dataclass

from rl_core.errors import ConfigError

AUTO = "auto"
COMMUNICATORS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
"""Communication library by device."""


@dataclass(frozen=True)
class HcclConfig:
    """Keys of `checkpoint_engine.options` with `backend: hccl`."""

    communicator: str = AUTO
    """`hccl`, `nccl` or `gloo`; `auto` takes the one of the device. Another one is refused."""
    direct_share: float = 0.25
    """Tensors of at least this share of a bucket travel from their own storage, unpacked; 0 packs
    all of them."""
    connect_timeout_s: float = 60.0
    """Longest time for all ranks to connect, within the deadline of the sync."""

    def __post_init__(self) -> None:
        """Check values; ConfigError."""
        known = (AUTO, *COMMUNICATORS.values())
        if self.communicator not in known:
            msg = f"communicator is {self.communicator!r}, must be one of {', '.join(known)}"
            raise ConfigError(msg)
        if not 0 <= self.direct_share <= 1:
            raise ConfigError(f"direct_share is {self.direct_share}, must be between 0 and 1")
        if not 0 < self.connect_timeout_s < math.inf:
            msg = f"connect_timeout_s is {self.connect_timeout_s}, must be positive and finite"
            raise ConfigError(msg)

    def communicator_for(self, device: str) -> str:
        """The communication library for tensors on `device`; ConfigError if they do not match."""
        fitting = COMMUNICATORS.get(device)
        if fitting is None:
            raise ConfigError(f"device is {device!r}, must be one of {', '.join(COMMUNICATORS)}")
        if self.communicator not in (AUTO, fitting):
            msg = f"communicator {self.communicator!r} does not move tensors on {device!r}"
            raise ConfigError(f"{msg}; use {fitting!r} or {AUTO!r}")
        return fitting
