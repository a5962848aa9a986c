"""Properties of weight synchronisation on a replica that other tests use, too, by one transport."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rl_core.errors import ComponentNotFoundError
from rl_core.plugins import CHECKPOINT_ENGINES, load_backend
from rl_core.testing.carried_case import CarriedCase, EngineFacts
from rl_core.testing.carriers import EngineRanks, TransferCarrier
from rl_core.testing.contract import SKIP_PREFIX
from rl_core.testing.rollout_case import RolloutUnderTest
from rl_core.testing.started_replica import StartedReplica
from rl_core.testing.weight_properties import WeightPropertyContract


@dataclass(frozen=True)
class TransportCell:
    """What is tested.

    Attributes:
        kind: of model.
        tp_size: ranks of the engine.
        transport: checkpoint engine.
        properties: their numbers.
    """

    kind: str
    tp_size: int
    transport: str
    properties: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}-tp{self.tp_size}-{self.transport}"


class Properties(WeightPropertyContract):
    """The contract, to be called test by test."""


def check_cell(
    cell: TransportCell,
    started: StartedReplica,
    given: RolloutUnderTest,
    poison: Callable[[], Any],
    root: Path,
) -> None:
    """Test the cell's properties on a replica that runs.

    Args:
        cell: which and how.
        started: the replica; it is left serving, with versions from its own `steps`.
        given: the same, as the rollout contract wants it.
        poison: overwrites its weights with NaN.
        root: directory for the transport.

    Skips where the transport is not installed: a rollout backend needs none.
    """
    assert len(started.adapters) == cell.tp_size
    try:
        load_backend(CHECKPOINT_ENGINES, cell.transport)
    except ComponentNotFoundError:
        pytest.skip(f"{SKIP_PREFIX}the transport {cell.transport} is not installed")
    ranks = EngineRanks.of(started.adapters, started.server, started.config)
    options = {"root_dir": str(root / "exchange")} if cell.transport == "disk" else {}
    carrier = TransferCarrier(cell.transport, options, ranks, root)
    facts = EngineFacts(poison=poison, cold=None, versions=None, held={})
    try:
        case = CarriedCase(given, carrier, facts)
        for number in cell.properties:
            getattr(Properties(), Properties.names[number])(case)
        case.threads.shutdown(wait=False, cancel_futures=True)
    finally:
        carrier.close()
