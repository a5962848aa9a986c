"""Options of the mooncake checkpoint engine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rl_core.buckets import MEGABYTE
from rl_core.errors import ConfigError

AUTO = "auto"
PROTOCOLS: Mapping[str, tuple[str, ...]] = {
    "tcp": ("cpu", "cuda"),
    "rdma": ("cpu", "cuda"),
    "ascend": ("npu",),
}
"""Protocols that are let through, and the devices whose memory each can move.

Mooncake itself takes any text, and silently uses tcp for what it does not know.
"""

LEAST_PIECE_BYTES = 4096
"""Smaller pieces would be more counters than weights."""

_DEFAULTS = {"cpu": "tcp", "cuda": "rdma", "npu": "ascend"}


@dataclass(frozen=True)
class MooncakeConfig:
    """Keys of `checkpoint_engine.options` with `backend: mooncake`."""

    protocol: str = AUTO
    """`tcp`, `rdma` or `ascend`; `auto` takes tcp on cpu, rdma on cuda, ascend on npu."""
    device_name: str = ""
    """Network devices for rdma, as Mooncake wants them (`mlx5_0,mlx5_1`); empty: all."""
    piece_megabytes: float = 8.0
    """A bucket is announced and read in pieces of this size, in MiB."""
    stall_timeout_s: int = 10
    """Seconds after which Mooncake gives up a transfer without progress, however much time the sync
    has left."""

    def __post_init__(self) -> None:
        """Check values; ConfigError."""
        known = (AUTO, *PROTOCOLS)
        if self.protocol not in known:
            msg = f"protocol is {self.protocol!r}, must be one of {', '.join(known)}"
            raise ConfigError(msg)
        if not math.isfinite(self.piece_megabytes) or self.piece_bytes < LEAST_PIECE_BYTES:
            least = LEAST_PIECE_BYTES / MEGABYTE
            raise ConfigError(f"piece_megabytes is {self.piece_megabytes}, must be {least} or more")
        if self.stall_timeout_s < 1:
            raise ConfigError(f"stall_timeout_s is {self.stall_timeout_s}, must be at least 1")

    @property
    def piece_bytes(self) -> int:
        """Size of a piece, in bytes."""
        return int(self.piece_megabytes * MEGABYTE)

    def protocol_for(self, device: str) -> str:
        """The protocol for memory of `device`; ConfigError if they do not match."""
        if device not in _DEFAULTS:
            raise ConfigError(f"device is {device!r}, must be one of {', '.join(_DEFAULTS)}")
        protocol = _DEFAULTS[device] if self.protocol == AUTO else self.protocol
        if device not in PROTOCOLS[protocol]:
            fitting = [name for name, devices in PROTOCOLS.items() if device in devices]
            msg = f"protocol {protocol!r} does not move memory of {device!r}"
            raise ConfigError(f"{msg}; use {' or '.join(map(repr, (*fitting, AUTO)))}")
        return protocol
