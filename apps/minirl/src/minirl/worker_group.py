"""The actor ranks, called together."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from minirl.ray_launcher import fetch, ready
from minirl.resource_pool import ResourcePool
from minirl.worker_process import ProcessSettings
from rl_core.errors import TransferTimeoutError
from rl_core.interfaces import RankPlace


class WorkerGroup:
    """One Ray actor of `worker_cls` on each bundle of a pool, in rank order."""

    def __init__(
        self,
        pool: ResourcePool,
        worker_cls: type,
        settings: ProcessSettings,
        environment: Mapping[str, str],
    ) -> None:
        self._pool = pool
        self._workers = [
            ray.remote(worker_cls)
            .options(
                num_cpus=0,
                resources={pool.resource: 1} if pool.resource != "GPU" else None,
                num_gpus=1 if pool.resource == "GPU" else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    pool.group, placement_group_bundle_index=bundle.index
                ),
                runtime_env={"env_vars": dict(environment)},
            )
            .remote(settings.named(f"actor_{rank}"))
            for rank, bundle in enumerate(pool.bundles)
        ]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._workers)

    def places(self, timeout_s: float) -> list[RankPlace]:
        """Rank, node-local rank and rendezvous of every worker."""
        bundles = self._pool.bundles
        port = self.call_rank(0, "free_port", timeout_s=timeout_s)
        return [
            RankPlace(
                rank, len(bundles), bundle.local_rank, bundles[0].host, port, self._pool.device
            )
            for rank, bundle in enumerate(bundles)
        ]

    def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """`method(*args)` on every rank; results in rank order."""
        return self.call_each(method, lambda _: args, timeout_s=timeout_s)

    def call_each(
        self, method: str, arguments: Callable[[int], Sequence[Any]], *, timeout_s: float
    ) -> list[Any]:
        """`method` on every rank with arguments of its own.

        The first failure is raised at once: the others may be waiting for the failed rank.
        """
        references = [
            getattr(worker, method).remote(*arguments(rank))
            for rank, worker in enumerate(self._workers)
        ]
        return self._collect(method, references, timeout_s)

    def call_rank(self, rank: int, method: str, *args: Any, timeout_s: float) -> Any:
        """`method` on one rank only; it must not be collective."""
        reference = getattr(self._workers[rank], method).remote(*args)
        return self._collect(method, [reference], timeout_s)[0]

    def kill(self) -> None:
        """End every worker process."""
        for worker in self._workers:
            ray.kill(worker)

    def _collect(self, method: str, references: list[Any], timeout_s: float) -> list[Any]:
        rank_of = {reference: rank for rank, reference in enumerate(references)}
        end = time.monotonic() + timeout_s
        waiting = list(references)
        results: dict[Any, Any] = {}
        while waiting:
            done, waiting = ready(waiting, end - time.monotonic())
            for reference in done:
                results[reference] = fetch(reference, f"actor rank {rank_of[reference]}")
            if not done and time.monotonic() >= end:
                ranks = [rank_of[reference] for reference in waiting]
                msg = f"{method}: actor ranks {ranks} did not answer within {timeout_s:.0f} s"
                raise TransferTimeoutError(msg)
        return [results[reference] for reference in references]
