"""A rank of a transfer whose receiver puts what comes into a rank of a rollout engine."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from rl_core.deadlines import Deadline
from rl_core.interfaces import Handle, LoadReport, RolloutAdapter, SupportsCheckpointPath
from rl_core.metadata import Manifest, TensorMeta
from rl_core.plugins import load_object
from rl_core.testing.checkpoint_driver import CheckpointDriver, reported
from rl_core.testing.checkpoint_orders import Received, ReceiveOrder
from rl_core.testing.checkpoint_recipe import POISON, RUN_ID
from rl_core.testing.weight_set import WeightSet
from rl_core.testing.weights_directory import load_weights, save_weights
from rl_core.torch import as_bytes
from rl_core.versions import PolicyVersion


@dataclass(frozen=True)
class StoredWeights:
    """A set of weights in a file, as senders stream it.

    Attributes:
        path: directory of the file.
        metas: of the tensors, in stream order.
    """

    path: str
    metas: tuple[TensorMeta, ...]

    @classmethod
    def of(cls, weights: WeightSet, root: Path) -> "StoredWeights":
        """Write `weights` below `root`, once for every content."""
        path = root / weights.weights_digest.rpartition(":")[2]
        if not path.exists():
            save_weights(weights.tensors, path)
        return cls(str(path), tuple(weights.metas))

    @property
    def scratch_bytes(self) -> int:
        """Nothing is made in memory that is handed in."""
        return 0

    def scratch(self) -> torch.Tensor:
        """Nothing."""
        return torch.empty(0, dtype=torch.uint8)

    def stream(self, scratch: torch.Tensor) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """The tensors, each overwritten with `POISON` when the next one is asked for."""
        del scratch
        tensors = _stored(self.path)
        for meta in self.metas:
            lent = tensors[meta.name].clone()
            yield meta, lent
            as_bytes(lent).fill_(POISON)

    def manifest(self, version: PolicyVersion, run_id: str = RUN_ID) -> Manifest:
        """What is announced when these weights are sent as `version`."""
        return Manifest(version, self.metas, run_id)


@lru_cache(maxsize=4)
def _stored(path: str) -> dict[str, torch.Tensor]:
    return load_weights(Path(path))


@dataclass
class Loaded(Received):
    """How one version was received and loaded.

    Attributes:
        report: the adapter's; None from ranks that have nothing to report (their replica's rank 0
            made all of it load a directory), and after an error.
    """

    report: LoadReport | None = None


class LoadingDriver(CheckpointDriver):
    """Feeds an engine rank, once it is attached to one; a sender, or a plain receiver, until then.

    As in the application in separate mode, but without Ray.
    """

    _adapter: RolloutAdapter | None = None
    _tp_rank = 0

    def attach(self, adapter: str, server: Handle, tp_rank: int, config: Any) -> None:
        """Feed rank `tp_rank` of the replica behind `server`, by the class `module:Class`."""
        self._adapter = load_object(adapter)(server, tp_rank, config)
        self._tp_rank = tp_rank

    def _receive(self, order: ReceiveOrder, deadline: Deadline) -> Received:
        if self._adapter is None:
            return super()._receive(order, deadline)
        loaded = Loaded()
        try:
            loaded.report = self._load(self._adapter, order.manifest, deadline)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test judges it
            loaded.error = reported(error)
            self.engine.abort(str(error))
        loaded.ended_at = time.monotonic()
        return loaded

    def _load(
        self, adapter: RolloutAdapter, manifest: Manifest, deadline: Deadline
    ) -> LoadReport | None:
        engine = self.engine
        if not isinstance(engine, SupportsCheckpointPath):
            leases = engine.receive_weights(manifest, deadline, self._cancel)
            return adapter.update_weights(iter(leases), manifest, deadline)
        checked = engine.get_checkpoint_path(manifest, deadline)
        if self._tp_rank != 0:
            return None
        return adapter.update_weights_from_disk(checked.path, manifest, deadline)
