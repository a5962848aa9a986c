"""The rollout replicas: started together, asked together, stopped together."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from minirl.resource_pool import Bundle, ResourcePool
from rl_core import plugins
from rl_core.deadlines import Deadline
from rl_core.errors import MiniRLError, RolloutError
from rl_core.interfaces import (
    Handle,
    Launcher,
    Placement,
    Replica,
    RolloutAdapter,
    RolloutBackend,
    RolloutMode,
)
from rl_core.logs import kv
from rl_core.trajectory import Completion, GenerateRequest
from rl_core.versions import PolicyVersion

_logger = logging.getLogger(__name__)

GENERATE_TIMEOUT_S = 3600.0


class RolloutManager:
    """Owns the replicas of one backend.

    Rollout rank r sits on bundle r of the pool: replica r // tp_size, tensor-parallel rank
    r % tp_size.
    """

    def __init__(self, name: str, config: Mapping[str, Any], launcher: Launcher) -> None:
        self.name = name
        self.backend: RolloutBackend
        self.config = config
        self.backend, self._typed_config = plugins.load_configured(
            plugins.ROLLOUT_BACKENDS, name, config, "rollout"
        )
        self._launcher = launcher
        self._replicas: list[Replica] = []
        self._leaders: list[RolloutAdapter] = []
        self.tp_size = int(config["tensor_model_parallel_size"])

    def create(self, pool: ResourcePool, world_size: int, mode: RolloutMode) -> None:
        """Create the replicas and let their processes import the engine in the background."""
        replica_cls = plugins.load_object(self.backend.replica)
        for rank in range(world_size // self.tp_size):
            bundles = pool.bundles[rank * self.tp_size : (rank + 1) * self.tp_size]
            placement = _placement(rank, bundles, mode, pool.device)
            replica = replica_cls(self._typed_config, self._launcher, placement)
            self._replicas.append(replica)
            replica.warm_up()

    def start(self, timeout_s: float) -> None:
        """Start all replicas and wait until every server answers."""
        adapter_cls = plugins.load_object(self.backend.adapter)
        deadline = Deadline.after(timeout_s)
        with ThreadPoolExecutor(len(self._replicas)) as pool:
            starting = [pool.submit(replica.start, deadline) for replica in self._replicas]
            for start in starting:
                start.result()
        self._leaders = [adapter_cls(r.server, 0, self._typed_config) for r in self._replicas]
        _logger.info(
            "Rollout servers ready: %s",
            kv(
                backend=self.name,
                replicas=len(self._replicas),
                tp_size=self.tp_size,
                addresses=[replica.address for replica in self._replicas],
            ),
        )

    def server_of(self, rank: int) -> Handle:
        """The server that rollout rank `rank` belongs to."""
        return self._replicas[rank // self.tp_size].server

    @property
    def world_size(self) -> int:
        """Rollout ranks."""
        return len(self._replicas) * self.tp_size

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Complete all requests, dealt out over the replicas in blocks; results in order."""
        count = len(self._replicas)
        share = -(-len(requests) // count)
        pending = [
            replica.server.submit("generate", list(block))
            for index, replica in enumerate(self._replicas)
            if (block := requests[index * share : (index + 1) * share])
        ]
        completions: list[Completion] = []
        for rank, call in enumerate(pending):
            with _named(rank):
                completions.extend(call.result(GENERATE_TIMEOUT_S))
        return completions

    def release(self, tags: Sequence[str], timeout_s: float) -> dict[str, int]:
        """Free engine memory on every replica; bytes freed by tag."""
        freed = dict.fromkeys(tags, 0)
        for rank, leader in enumerate(self._leaders):
            with _named(rank):
                for tag, nbytes in leader.release(tags, timeout_s).items():
                    freed[tag] += nbytes
        return freed

    def resume(self, tags: Sequence[str], timeout_s: float) -> None:
        """Allocate engine memory again on every replica."""
        for rank, leader in enumerate(self._leaders):
            with _named(rank):
                leader.resume(tags, timeout_s)

    def commit(self, version: PolicyVersion, timeout_s: float) -> None:
        """Every replica serves `version` from here on."""
        for rank, leader in enumerate(self._leaders):
            with _named(rank):
                leader.commit(version, timeout_s)

    def fence(self, reason: str, timeout_s: float) -> None:
        """No replica answers any more; one that cannot be told is logged."""
        for rank, leader in enumerate(self._leaders):
            try:
                leader.fence(reason, timeout_s)
            except (MiniRLError, TimeoutError) as error:
                _logger.warning("replica %d could not be fenced: %s", rank, error)

    def shutdown(self, timeout_s: float) -> None:
        """Stop every server. Idempotent; one that does not stop is logged and killed later."""
        for rank, replica in enumerate(self._replicas):
            try:
                replica.shutdown(timeout_s)
            except (MiniRLError, TimeoutError) as error:
                _logger.warning("replica %d did not stop: %s", rank, error)
        self._replicas.clear()
        self._leaders.clear()


@contextmanager
def _named(rank: int) -> Iterator[None]:
    """Say which replica failed."""
    try:
        yield
    except RolloutError as error:
        raise type(error)(f"replica {rank}: {error}") from error


def _placement(
    replica_rank: int, bundles: Sequence[Bundle], mode: RolloutMode, device: str
) -> Placement:
    return Placement(
        replica_rank=replica_rank,
        mode=mode,
        tp_size=len(bundles),
        node_id=bundles[0].node_id,
        host=bundles[0].host,
        device=device,
        visible_devices=() if device == "cpu" else tuple(str(b.local_rank) for b in bundles),
    )
