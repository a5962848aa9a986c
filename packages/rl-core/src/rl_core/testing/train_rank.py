"""One rank of a train engine in a process of its own, and a group of them."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_core.deadlines import Deadline
from rl_core.errors import LifecycleError
from rl_core.interfaces import Handle, Launcher, Placement, RankPlace, TrainEngine
from rl_core.metadata import Manifest
from rl_core.plugins import load_object
from rl_core.torch import content_digest, dtype_name
from rl_core.versions import PolicyVersion


@dataclass(frozen=True)
class Streamed:
    """What one rank announced and then streamed.

    Attributes:
        manifest: what was announced.
        tensors: copies by name, in stream order.
        digests: content digests by name.
    """

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    digests: dict[str, str] = field(default_factory=dict)


class TrainRank:
    """Hosts one engine after the other; every method is called on all ranks at the same time."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._engine: TrainEngine | None = None

    def create(self, engine: str, config: Any, place: RankPlace) -> None:
        """Shut the last engine down and make a new one, not initialized yet."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = load_object(engine)(config, place)

    def run(self, method: str, *args: Any) -> Any:
        """Call a method of the engine."""
        return getattr(self._present(), method)(*args)

    def stream(self, version: PolicyVersion, run_id: str) -> Streamed:
        """Announce and stream everything; each tensor is copied before the next one comes."""
        engine = self._present()
        streamed = Streamed(engine.manifest(version, run_id), {})
        for meta, tensor in engine.get_per_tensor_param():
            copy = tensor.detach().cpu().clone()
            if meta.name in streamed.tensors:
                raise ValueError(f"{meta.name} is streamed twice")
            if (meta.shape, meta.dtype) != (tuple(copy.shape), dtype_name(copy.dtype)):
                raise ValueError(f"{meta} was streamed as {tuple(copy.shape)} {copy.dtype}")
            streamed.tensors[meta.name] = copy
            streamed.digests[meta.name] = content_digest(meta, copy)
        return streamed

    def _present(self) -> TrainEngine:
        if self._engine is None:
            raise LifecycleError("no engine was created")
        return self._engine


class RankPool:
    """Processes that host the ranks of one group after the other (an import costs seconds)."""

    def __init__(self, launcher: Launcher, timeout_s: float) -> None:
        self._launcher = launcher
        self._timeout_s = timeout_s
        self._handles: list[Handle] = []

    def create(self, engine: str, config: Any, world_size: int) -> "RankGroup":
        """A group of engines, not initialized yet; the group before it is shut down."""
        while len(self._handles) < world_size:
            cls = f"{TrainRank.__module__}:{TrainRank.__name__}"
            env = {"OMP_NUM_THREADS": "1"}
            self._handles.append(self._launcher.launch(cls, {}, env, Placement()))
        group = RankGroup(self._handles[:world_size], self._timeout_s)
        port = _free_port()
        places = [RankPlace(rank, world_size, rank, master_port=port) for rank in range(world_size)]
        group.gather("create", [(engine, config, place) for place in places])
        return group

    def close(self) -> None:
        """End the processes. Idempotent."""
        for handle in self._handles:
            handle.kill()
        self._handles = []


class RankGroup:
    """All ranks of one train engine."""

    def __init__(self, handles: Sequence[Handle], timeout_s: float) -> None:
        self._handles = handles
        self._timeout_s = timeout_s

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._handles)

    def run(self, method: str, *args: Any) -> list[Any]:
        """Call an engine method with the same arguments on every rank; results in rank order."""
        return self.each(method, [args] * self.size)

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call an engine method with each rank's own arguments."""
        return self.gather("run", [(method, *args) for args in arguments])

    def stream(self, version: PolicyVersion, run_id: str = "contract") -> list[Streamed]:
        """Announce and stream on every rank."""
        return self.gather("stream", [(version, run_id)] * self.size)

    def gather(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of `TrainRank` on every rank."""
        deadline = Deadline.after(self._timeout_s)
        pending = [
            handle.submit(method, *args)
            for handle, args in zip(self._handles, arguments, strict=True)
        ]
        return [call.result(deadline.remaining()) for call in pending]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
