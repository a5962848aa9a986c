"""Where processes run, and how their objects are called."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class RankPlace(msgspec.Struct, frozen=True):
    """Where one rank of a process group runs.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        local_rank: rank on its node; index of its device there.
        master_address: host of rank 0.
        master_port: free TCP port on that host.
        device: `cpu`, `cuda` or `npu`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 29500
    device: str = "cpu"


class RolloutMode(StrEnum):
    """Whether a replica shares its devices with actor ranks."""

    HYBRID = "hybrid"
    STANDALONE = "standalone"


class Placement(msgspec.Struct, frozen=True):
    """Where one node's part of a rollout replica runs.

    Attributes:
        replica_rank: number of the replica.
        mode: `hybrid` shares devices with actor ranks, `standalone` owns them.
        tp_size: tensor-parallel ranks of the replica.
        node_rank: number of this node within the replica.
        nnodes: nodes that the replica spans.
        node_id: launcher's name of the node to start on; None lets the launcher choose.
        host: address that the HTTP server binds and announces; never a wildcard.
        device: `cpu`, `cuda` or `npu`.
        visible_devices: vendor device ids, in rank order; empty on cpu.
    """

    replica_rank: int = 0
    mode: RolloutMode = RolloutMode.HYBRID
    tp_size: int = 1
    node_rank: int = 0
    nnodes: int = 1
    node_id: str | None = None
    host: str = "127.0.0.1"
    device: str = "cpu"
    visible_devices: tuple[str, ...] = ()


class Pending(Protocol):
    """A call under way in another process."""

    def result(self, timeout: float) -> Any:
        """Its value, or the error it raised there; TimeoutError after `timeout` seconds."""
        ...


class Handle(Protocol):
    """An object living in another process. Picklable, so that ranks can be given one."""

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Start `method` there; async methods of one object run concurrently."""
        ...

    def call(self, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """`submit` and wait for the result."""
        ...

    def kill(self) -> None:
        """End the process and everything it started. Idempotent."""
        ...


class Launcher(Protocol):
    """Starts objects in processes of their own (Ray actors, subprocesses)."""

    def launch(
        self, cls: str, kwargs: Mapping[str, Any], env: Mapping[str, str], placement: Placement
    ) -> Handle:
        """Create `cls` (`module:Class`) with `kwargs` in a new process with `env` added."""
        ...
