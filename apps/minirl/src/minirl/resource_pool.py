"""Devices reserved for one role, in rank order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from minirl.ray_cluster import resource_name
from rl_core.errors import ConfigError
from rl_core.interfaces import Placement, RolloutMode


@dataclass(frozen=True)
class Bundle:
    """One reserved device.

    Attributes:
        index: number of the bundle in its placement group.
        node_id: Ray's id of its node.
        host: the node's address.
        local_rank: number among the pool's bundles on that node.
    """

    index: int
    node_id: str
    host: str
    local_rank: int


class ResourcePool:
    """`world_size` devices in one placement group; rank r owns bundle r after sorting by node."""

    def __init__(self, name: str, world_size: int, device: str) -> None:
        """Describe the pool; `reserve` gets the devices."""
        self.name = name
        self.device = device
        self.world_size = world_size
        self.resource = resource_name(device)
        self._group: PlacementGroup | None = None
        self.bundles: list[Bundle] = []

    @property
    def group(self) -> PlacementGroup:
        """The placement group; `reserve` first."""
        if self._group is None:
            raise ConfigError(f"resource pool {self.name} was not reserved")
        return self._group

    def device_options(self) -> dict[str, Any]:
        """Ray options of an actor that owns one of the pool's devices."""
        if self.resource == "GPU":
            return {"num_gpus": 1}
        return {"resources": {self.resource: 1}}

    def reserve(self, timeout_s: float) -> None:
        """Reserve the devices; ConfigError saying what the cluster has, if there are too few."""
        demand = [{self.resource: 1.0} for _ in range(self.world_size)]
        self._group = placement_group(demand, strategy="PACK", name=f"minirl-{self.name}")
        try:
            ray.get(self._group.ready(), timeout=timeout_s)
        except GetTimeoutError as error:
            have = ray.cluster_resources().get(self.resource, 0)
            msg = (
                f"cluster.{self.name}: {self.world_size} x {self.resource} wanted, the cluster "
                f"has {have:g}; lower n_gpus_per_node or nnodes"
            )
            raise ConfigError(msg) from error
        self.bundles = self._sorted_bundles()

    def release(self) -> None:
        """Give the devices back. Idempotent."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _sorted_bundles(self) -> list[Bundle]:
        table = ray.util.placement_group_table(self.group)
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        if len(nodes) == 1:
            # Nothing of a run on one host needs to be reachable from another one.
            nodes = dict.fromkeys(nodes, "127.0.0.1")
        placed = sorted(table["bundles_to_node_id"].items(), key=lambda item: (item[1], item[0]))
        seen: dict[str, int] = {}
        bundles = []
        for index, node_id in placed:
            local_rank = seen.get(node_id, 0)
            seen[node_id] = local_rank + 1
            bundles.append(Bundle(int(index), node_id, nodes[node_id], local_rank))
        return bundles


def placement_on(
    bundles: Sequence[Bundle], replica_rank: int, mode: RolloutMode, device: str
) -> Placement:
    """Where a replica with a rank on each of these bundles, of one node, lives."""
    return Placement(
        replica_rank=replica_rank,
        mode=mode,
        tp_size=len(bundles),
        node_id=bundles[0].node_id,
        host=bundles[0].host,
        device=device,
        visible_devices=() if device == "cpu" else tuple(str(b.local_rank) for b in bundles),
    )
