"""Ray actors of one class on the devices of one pool, called together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from minirl.last_words import ProcessLog
from minirl.ray_launcher import errors_that_travel
from minirl.resource_pool import ResourcePool
from minirl.worker_calls import WorkerCall, wait_all
from minirl.worker_process import ProcessSettings
from rl_core.interfaces import RankPlace


class WorkerHost:
    """The Ray actor that holds one worker; see `errors_that_travel`."""

    def __init__(self, worker_cls: type, settings: ProcessSettings) -> None:
        self._worker = worker_cls(settings)

    def invoke(self, method: str, arguments: Sequence[Any]) -> Any:
        """Run one method of the worker to its end."""
        with errors_that_travel():
            return getattr(self._worker, method)(*arguments)


class WorkerGroup:
    """One Ray actor of `worker_cls` on each bundle of a pool, in rank order.

    Args:
        role: what the ranks are called in messages and log files, such as `actor`.
        pool: reserved devices.
        worker_cls: constructed with its `ProcessSettings`.
        settings: how the processes report.
        environment: added to the processes' environment.
    """

    def __init__(
        self,
        role: str,
        pool: ResourcePool,
        worker_cls: type,
        settings: ProcessSettings,
        environment: Mapping[str, str],
    ) -> None:
        self._role = role
        self._pool = pool
        named = [settings.named(f"{role}_{rank}") for rank in range(len(pool.bundles))]
        self._logs = [ProcessLog.from_now(each.log_path) for each in named]
        # Its name is what `ps` and Ray's tools show of the process.
        host_cls = type(worker_cls.__name__, (WorkerHost,), {})
        self._workers = [
            ray.remote(host_cls)
            .options(
                num_cpus=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    pool.group, placement_group_bundle_index=bundle.index
                ),
                runtime_env={"env_vars": dict(environment)},
                **pool.device_options(),
            )
            .remote(worker_cls, each)
            for bundle, each in zip(pool.bundles, named, strict=True)
        ]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._workers)

    def places(self, timeout_s: float) -> list[RankPlace]:
        """Rank, node-local rank and rendezvous of every worker."""
        bundles = self._pool.bundles
        port = self.call_rank(0, "free_port", timeout_s=timeout_s)
        host, device = bundles[0].host, self._pool.device
        return [
            RankPlace(rank, len(bundles), bundle.local_rank, host, port, device)
            for rank, bundle in enumerate(bundles)
        ]

    def host_of(self, rank: int) -> str:
        """Address of the node that a rank runs on."""
        return self._pool.bundles[rank].host

    def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """`method(*args)` on every rank; results in rank order."""
        return self.call_each(method, lambda _: args, timeout_s=timeout_s)

    def call_each(
        self,
        method: str,
        arguments: Callable[[int], Sequence[Any]],
        ranks: Sequence[int] | None = None,
        *,
        timeout_s: float,
    ) -> list[Any]:
        """`submit_each` and wait; errors as in `wait_all`."""
        return wait_all(method, self.submit_each(method, arguments, ranks), timeout_s)

    def call_rank(self, rank: int, method: str, *args: Any, timeout_s: float) -> Any:
        """`method` on one rank only; it must not be collective."""
        return wait_all(method, [self._submit(rank, method, args)], timeout_s)[0]

    def submit_each(
        self,
        method: str,
        arguments: Callable[[int], Sequence[Any]],
        ranks: Sequence[int] | None = None,
    ) -> list[WorkerCall]:
        """Start `method` on every rank, or on some, with arguments of its own.

        The calls are to be waited for together with others.
        """
        chosen = range(self.world_size) if ranks is None else ranks
        return [self._submit(rank, method, arguments(rank)) for rank in chosen]

    def kill(self) -> None:
        """End every worker process."""
        for worker in self._workers:
            ray.kill(worker)

    def _submit(self, rank: int, method: str, arguments: Sequence[Any]) -> WorkerCall:
        reference = self._workers[rank].invoke.remote(method, arguments)
        return WorkerCall(reference, self._role, rank, self._logs[rank])
