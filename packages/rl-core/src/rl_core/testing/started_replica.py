"""Running replicas of a rollout backend with their adapters, for a backend's own tests."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rl_core.deadlines import Deadline
from rl_core.interfaces import Replica, RolloutBackend
from rl_core.plugins import load_object
from rl_core.testing.weight_set import WeightSet, leases
from rl_core.versions import PolicyVersion

START_S = 240.0
CALL_S = 60.0
STOP_S = 30.0


class StartedReplica:
    """One running replica, fed from this process.

    Args:
        backend: what the package announces.
        replica: created, not started.
        config: the backend's, which the replica was made from.

    Attributes:
        config: the backend's.
        server: its server.
        adapters: one for each tensor-parallel rank.
        steps: numbers of the versions to come.
    """

    def __init__(self, backend: RolloutBackend, replica: Replica, config: Any) -> None:
        self.replica = replica
        self.config = config
        replica.start(Deadline.after(START_S))
        self.server = replica.server
        adapter_cls = load_object(backend.adapter)
        ranks = range(config.tensor_model_parallel_size)
        self.adapters = [adapter_cls(self.server, rank, config) for rank in ranks]
        self.steps: Iterator[int] = itertools.count()
        self._threads = ThreadPoolExecutor(len(self.adapters))

    def state(self) -> Any:
        """What the server says of itself."""
        return self.server.call("live_state", timeout=CALL_S)

    def worker(self, method: str, *args: Any) -> Any:
        """Call a method of the backend's extension on every engine rank."""
        return self.server.call("worker_call", method, *args, timeout=CALL_S)

    def next_version(self) -> PolicyVersion:
        """A version newer than all before."""
        return PolicyVersion(1, next(self.steps))

    def sync(self, weights: WeightSet) -> None:
        """Load into all ranks at the same time, and commit."""
        manifest = weights.manifest(self.next_version())
        entries = weights.entries()
        updates = [
            self._threads.submit(
                adapter.update_weights, leases(entries, 3), manifest, Deadline.after(CALL_S)
            )
            for adapter in self.adapters
        ]
        for update in updates:
            update.result(CALL_S)
        self.adapters[0].commit(manifest.version, CALL_S)


class StartedReplicas:
    """Starts replicas on demand, each kind once, and ends them."""

    def __init__(self, start: Callable[[str], StartedReplica]) -> None:
        """`start` makes the replica of a kind."""
        self._start = start
        self._threads = ThreadPoolExecutor(2)
        self._starting: dict[str, Future[StartedReplica]] = {}

    def prepare(self, *kinds: str) -> None:
        """Begin to start several, two at a time: coming up is mostly importing."""
        for kind in kinds:
            if kind not in self._starting:
                self._starting[kind] = self._threads.submit(self._start, kind)

    def __call__(self, kind: str) -> StartedReplica:
        """The replica of a kind, up."""
        self.prepare(kind)
        return self._starting[kind].result(START_S)

    def end(self, *kinds: str) -> None:
        """Stop those of these kinds, or all; they are started anew when asked for."""
        for kind in kinds or list(self._starting):
            self._starting.pop(kind).result(START_S).replica.shutdown(STOP_S)
