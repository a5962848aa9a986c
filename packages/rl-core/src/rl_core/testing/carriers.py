"""Ways of weights into a running replica: in fused mode, or through a checkpoint engine.

A carrier takes versions to all ranks of one replica, as the application does it in one of its
modes; several carriers can serve the same replica, one after the other.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_core.digests import XXH3_128
from rl_core.errors import LifecycleError, MiniRLError, TransferError
from rl_core.testing import checkpoint_case
from rl_core.testing.checkpoint_case import CheckpointCase, Deadlines
from rl_core.testing.checkpoint_group import Terms
from rl_core.testing.checkpoint_orders import Mishap
from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.loading_driver import Loaded, StoredWeights
from rl_core.testing.weight_set import leases

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rl_core.interfaces import BucketLease, Handle, LoadReport, RolloutAdapter
    from rl_core.metadata import Manifest
    from rl_core.testing.checkpoint_group import Member, Outcome
    from rl_core.testing.checkpoint_orders import Options
    from rl_core.testing.rollout_case import RolloutCase
    from rl_core.testing.weight_set import WeightSet

DRIVER = "rl_core.testing.loading_driver:LoadingDriver"
ATTACH_S = 30.0
FAULT_S = 3.0
"""Deadline of a sync that is made to fail, in seconds."""

OVER_S = 5.0
"""Seconds after its deadline within which every side must have ended."""

_TAGS = ["kv_cache", "weights"]


@dataclass(frozen=True)
class Route:
    """What must not matter to what arrives.

    Attributes:
        per_bucket: tensors in a bucket in fused mode; None: all.
        bucket_megabytes: size of a checkpoint engine's bucket, in MiB.
        senders: actor ranks, of which the first sends the bytes.
        digests: whether digests travel along; without them the disk engine's receivers load the
            directory themselves.
        hands_memory: in fused mode, whether the engine's memory is released and resumed.
    """

    per_bucket: int | None = 3
    bucket_megabytes: float = 64.0
    senders: int = 2
    digests: bool = True
    hands_memory: bool = True


@dataclass(frozen=True)
class Ending:
    """How a sync that was harmed ended.

    Attributes:
        harm: what was done to it.
        errors: of all sides that should have had one; what should not have ended well and did is
            a `LoadReport`.
        seconds: until the last side had ended.
    """

    harm: str
    errors: Sequence[LoadReport | BaseException]
    seconds: float


class Carrier(ABC):
    """Takes weights to the ranks of one replica.

    Attributes:
        name: of the transport.
        ways: routes that must make no difference.
        harms: what `harmed` can do to a sync.
    """

    name: str
    ways: Sequence[Route]
    harms: Sequence[str]

    @abstractmethod
    def carry(
        self, case: RolloutCase, weights: WeightSet, manifest: Manifest, route: Route
    ) -> list[LoadReport | BaseException]:
        """Load into all ranks, without commit; what each rank reported or raised."""

    @abstractmethod
    def harmed(
        self, case: RolloutCase, weights: WeightSet, manifest: Manifest, harm: str, seconds: float
    ) -> Ending:
        """A sync with a deadline of `seconds` to which something happens in the middle."""

    @abstractmethod
    def close(self) -> None:
        """End what was started."""


class FusedCarrier(Carrier):
    """As in fused mode: every actor rank streams into the engine rank beside it."""

    name = "fused"
    ways = (Route(1), Route(None), Route(2, hands_memory=False), Route(7))
    harms = ("the stream fails", "the stream stalls", "a rank is never fed")

    def carry(
        self, case: RolloutCase, weights: WeightSet, manifest: Manifest, route: Route
    ) -> list[LoadReport | BaseException]:
        """See `Carrier`; the engine gives its memory away first, and gets it back."""
        if route.hands_memory:
            case.first.release(_TAGS, case.given.timeout_s)
            case.first.resume(["weights"], case.given.timeout_s)
        entries = weights.entries()
        try:
            return case.outcomes(lambda: leases(entries, route.per_bucket), manifest)
        finally:
            if route.hands_memory:
                case.first.resume(["kv_cache"], case.given.timeout_s)

    def harmed(
        self, case: RolloutCase, weights: WeightSet, manifest: Manifest, harm: str, seconds: float
    ) -> Ending:
        """See `Carrier`."""
        entries = weights.entries()

        def stream() -> Iterator[BucketLease]:
            buckets = leases(entries, 2)
            yield next(buckets)
            if harm == "the stream fails":
                raise TransferError("the peer went away")
            if harm == "the stream stalls":
                time.sleep(1.2 * FAULT_S)
            yield from buckets

        fed = case.given.adapters[: -1 if harm == "a rank is never fed" else None]
        if not fed:
            return Ending(harm, [], 0.0)
        begun = time.monotonic()
        errors = case.outcomes(stream, manifest, seconds, fed)
        return Ending(harm, errors, time.monotonic() - begun)

    def close(self) -> None:
        """Nothing was started."""


@dataclass(frozen=True)
class EngineRanks:
    """How other processes reach the ranks of a replica.

    Attributes:
        adapter: `module:Class`.
        server: of the replica; picklable.
        config: the adapter's.
        tp_size: ranks.
    """

    adapter: str
    server: Handle
    config: Any
    tp_size: int

    @classmethod
    def of(cls, adapters: Sequence[RolloutAdapter], server: Handle, config: Any) -> EngineRanks:
        """Those of a replica that runs, with adapters of this process."""
        kind = type(adapters[0])
        return cls(f"{kind.__module__}:{kind.__name__}", server, config, len(adapters))


class TransferCarrier(Carrier):
    """As in separate mode: a checkpoint engine between actor ranks and a process for each rank."""

    ways = (
        Route(bucket_megabytes=0.25),
        Route(senders=1),
        Route(bucket_megabytes=1.0, senders=1),
        Route(digests=False),
    )
    harms = ("the stream fails", "the stream stalls", "the sender dies")

    def __init__(self, backend: str, options: Options, ranks: EngineRanks, root: Path) -> None:
        """By the checkpoint engine `backend`; what senders send is kept in files under `root`."""
        self.name = backend
        self._options = options
        self._ranks = ranks
        self._root = root
        self._case = _LoadingCase(backend, options, ranks, root / "logs")

    def carry(
        self, case: RolloutCase, weights: WeightSet, manifest: Manifest, route: Route
    ) -> list[LoadReport | BaseException]:
        """See `Carrier`."""
        del case
        return _ends(self._sync(weights, manifest, route))

    def harmed(
        self, case: RolloutCase, weights: WeightSet, manifest: Manifest, harm: str, seconds: float
    ) -> Ending:
        """See `Carrier`."""
        del case
        mishap = {
            "the stream fails": Mishap(3, "raise"),
            "the stream stalls": Mishap(3, "stall", 1.2 * FAULT_S),
            "the sender dies": Mishap(3, "die"),
        }[harm]
        begun = time.monotonic()
        orders = {"sender 0": {"mishap": mishap}}
        outcome = self._sync(weights, manifest, Route(), orders, seconds)
        return Ending(harm, _ends(outcome), time.monotonic() - begun)

    def close(self) -> None:
        """End the processes of both sides."""
        self._case.close()

    def _sync(
        self,
        weights: WeightSet,
        manifest: Manifest,
        route: Route,
        orders: dict[str, dict[str, Any]] | None = None,
        seconds: float | None = None,
    ) -> Outcome:
        digest_kind = XXH3_128 if route.digests else None
        terms = Terms(route.bucket_megabytes, digest_kind, manifest.run_id, self._options)
        stored = replace(StoredWeights.of(weights, self._root), metas=manifest.tensors)
        group = self._case.group(route.senders, self._ranks.tp_size, terms)
        return group.sync(stored, manifest, orders, seconds)


class _LoadingCase(CheckpointCase):
    """Processes whose receivers feed the ranks of a replica."""

    driver = DRIVER

    def __init__(self, backend: str, options: Options, ranks: EngineRanks, logs: Path) -> None:
        # What other tests preload, too: a process for all of them.
        launcher = ProcessLauncher(logs, preload=[checkpoint_case.DRIVER.partition(":")[0]])
        super().__init__(backend, options, launcher, {}, Deadlines(60.0, FAULT_S))
        self._ranks = ranks
        self._attached: list[Member] = []

    def _member(self, role: str, rank: int) -> Member:
        member = super()._member(role, rank)
        if role == "receiver" and not any(member is known for known in self._attached):
            ranks = self._ranks
            arguments = (ranks.adapter, ranks.server, rank, ranks.config)
            member.handle.call("attach", *arguments, timeout=ATTACH_S)
            self._attached.append(member)
        return member


def _ends(outcome: Outcome) -> list[LoadReport | BaseException]:
    """What receivers ended with; if that was nothing but good, what failed anywhere else."""
    found: list[LoadReport | BaseException] = []
    for end in outcome.received.values():
        if end is None:
            found.append(TransferError("the process is gone"))
        elif end.error is not None:
            found.append(end.error)
        elif isinstance(end, Loaded) and end.report is not None:
            found.append(end.report)
    if any(isinstance(end, BaseException) for end in found):
        return found
    errors = [error for error in outcome.errors.values() if isinstance(error, MiniRLError)]
    return list(errors) or found or [LifecycleError("no rank reported anything")]
