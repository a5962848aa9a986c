"""The rollout replicas: started together, asked together, stopped together."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

from minirl.generation_watch import GenerationLimits, GenerationWatch, StalledError
from minirl.replica_faults import naming, told
from minirl.replica_start import ReplicaStart, wait_for
from minirl.resource_pool import ResourcePool, placement_on
from rl_core import plugins
from rl_core.deadlines import Deadline
from rl_core.errors import MiniRLError, ReplicaFencedError, VerificationError
from rl_core.interfaces import (
    Handle,
    Launcher,
    LiveContent,
    Replica,
    RolloutAdapter,
    RolloutBackend,
    RolloutMode,
    SupportsLiveContent,
    SupportsLiveDigests,
)
from rl_core.logs import kv
from rl_core.publish import (
    Begin,
    Commit,
    Event,
    Failed,
    Outdated,
    Phase,
    Received,
    ReplicaState,
    Verified,
    advance,
)
from rl_core.trajectory import Completion, GenerateRequest
from rl_core.versions import PolicyVersion

_logger = logging.getLogger(__name__)

OnEnded = Callable[[Sequence[Completion]], None]

_PATIENT = GenerationLimits()
_START_ENDS_S = 2.0
_ANSWERS_S = 30.0
"""Seconds in which a living replica answers a question that costs it nothing."""


class RolloutManager:
    """Owns the replicas of one backend.

    Rollout rank r sits on bundle r of the pool: replica r // tp_size, tensor-parallel rank
    r % tp_size.

    A replica that comes up while the others serve is JOINING, and gets no request, until a sync
    that it took part in is committed. One that was given up gets nothing any more. The manager's
    state of a replica follows the one that the replica's own gate keeps.

    Attributes:
        given_up: why, by replica.
        goes_on: whether a replica that failed is done without, while there are others.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        launcher: Launcher,
        *,
        goes_on: bool = False,
        limits: GenerationLimits = _PATIENT,
    ) -> None:
        self.name = name
        self.backend: RolloutBackend
        self.config = config
        self.backend, self._typed_config = plugins.load_configured(
            plugins.ROLLOUT_BACKENDS, name, config, "rollout"
        )
        self._launcher = launcher
        self._replicas: list[Replica] = []
        self._starts: list[ReplicaStart] = []
        self._states: list[ReplicaState] = []
        self._leaders: dict[int, RolloutAdapter] = {}
        self._late: set[int] = set()
        self.given_up: dict[int, str] = {}
        self.goes_on = goes_on
        self._limits = limits
        self.tp_size = int(config["tensor_model_parallel_size"])

    def create(self, pool: ResourcePool, world_size: int, mode: RolloutMode) -> None:
        """Create the replicas and let their processes import the engine in the background."""
        replica_cls = plugins.load_object(self.backend.replica)
        for rank in range(world_size // self.tp_size):
            bundles = pool.bundles[rank * self.tp_size : (rank + 1) * self.tp_size]
            placement = placement_on(bundles, rank, mode, pool.device)
            replica = replica_cls(self._typed_config, self._launcher, placement)
            self._replicas.append(replica)
            self._states.append(ReplicaState())
            replica.warm_up()

    def start(self, timeout_s: float, at_least: int | None = None) -> None:
        """Start all replicas and wait until every server answers, or `at_least` of them.

        Errors: that of a replica which failed to start; later ones come from `up`.
        """
        deadline = Deadline.after(timeout_s)
        self._starts = [
            ReplicaStart(rank, replica, deadline) for rank, replica in enumerate(self._replicas)
        ]
        wait_for(self._starts, len(self._starts) if at_least is None else at_least)
        up = self.up()
        self._late = set(range(len(self._replicas))) - set(up)
        starting = {"starting": sorted(self._late)} if self._late else {}
        _logger.info(
            "Rollout servers ready: %s",
            kv(
                backend=self.name,
                replicas=len(up),
                tp_size=self.tp_size,
                addresses=[self._replicas[rank].address for rank in up],
                **starting,
            ),
        )

    def up(self) -> list[int]:
        """Numbers of the replicas whose server answers; the error of one that failed to start."""
        for rank, start in enumerate(self._starts):
            if start.up() and rank not in self._leaders and rank not in self.given_up:
                adapter_cls = plugins.load_object(self.backend.adapter)
                self._leaders[rank] = adapter_cls(
                    self._replicas[rank].server, 0, self._typed_config
                )
        return sorted(self._leaders)

    def newcomers(self) -> list[int]:
        """Those of `up` that have never been given a version."""
        return [rank for rank in self.up() if self._states[rank].phase is Phase.JOINING]

    def joins(self, replica: int) -> bool:
        """Whether a replica came late and has served nothing yet."""
        return replica in self._late

    def adapter_arguments(self, rank: int) -> tuple[str, Mapping[str, Any], Handle, int]:
        """What an adapter for rollout rank `rank` is made of: `RolloutMember.init_rollout`."""
        server = self._replicas[rank // self.tp_size].server
        return self.name, self.config, server, rank % self.tp_size

    @property
    def engine_name(self) -> str:
        """How the log spells the engine."""
        return self.backend.engine_name or self.name

    @property
    def world_size(self) -> int:
        """Rollout ranks."""
        return len(self._replicas) * self.tp_size

    @property
    def receiving(self) -> list[int]:
        """Rollout ranks of the replicas that the version under way goes to."""
        return [rank for rank in range(self.world_size) if self._receives(rank // self.tp_size)]

    def generate(
        self, requests: Sequence[GenerateRequest], on_ended: OnEnded | None = None
    ) -> list[Completion]:
        """Complete all requests, dealt out in blocks over the replicas that have joined.

        Results are in order. Those of a replica that turns out to be dead, or makes no token for
        too long, are asked again of the others, as they are, if that is to be done without.
        `on_ended` is given each completion of the result once, as soon as it is known, and nothing
        every few seconds, so that it can end this by an error.

        Errors: ReplicaFencedError if no version was published; that of a replica which failed to
        start, or which failed and cannot be done without (StalledError).
        """
        self.up()
        done: dict[str, Completion] = {}
        failures: list[Exception] = []
        left = list(requests)
        while left:
            asked = [rank for rank in self._leaders if self._states[rank].committed is not None]
            if not asked:
                nobody = ReplicaFencedError("no replica has weights yet; sync them first")
                raise failures[0] if failures else nobody
            before = len(failures)
            for ended in self._ask(left, asked, failures, early=on_ended is not None):
                fresh = {one.request_id: one for one in ended if one.request_id not in done}
                done |= fresh
                if on_ended is not None:
                    on_ended(list(fresh.values()))
            again = requests if len(failures) > before else ()
            left = [request for request in again if request.request_id not in done]
        return [done[request.request_id] for request in requests]

    def _ask(
        self,
        requests: Sequence[GenerateRequest],
        asked: Sequence[int],
        failures: list[Exception],
        *,
        early: bool,
    ) -> Iterator[list[Completion]]:
        """Ask each replica for its block; less comes if one is given up.

        With `early` some come as soon as they have ended, and again with the rest.
        """
        share = -(-len(requests) // len(asked))
        watches: dict[int, GenerationWatch] = {}
        for rank, start in zip(asked, range(0, len(requests), share), strict=False):
            block = requests[start : start + share]
            with self._done_without(rank, failures):
                call = self._replicas[rank].server.submit("generate", list(block))
                parts = call, self._leaders[rank], self._limits
                watches[rank] = GenerationWatch(*parts, block if early else ())
        while watches:
            for rank, watch in list(watches.items()):
                with self._done_without(rank, failures):
                    yield watch.news(1 / len(watches))
                if watch.over or rank in self.given_up:
                    del watches[rank]

    @contextmanager
    def _done_without(self, rank: int, failures: list[Exception]) -> Iterator[None]:
        """A failure of a replica that is dead or stalled only gives it up, if the run may go on."""
        try:
            with naming(rank):
                yield
        except (MiniRLError, TimeoutError) as error:
            if not self.goes_on:
                raise
            if not isinstance(error, StalledError) and self.dead(rank) is None:
                raise
            self.give_up(rank, str(error))
            failures.append(error)

    def release(self, tags: Sequence[str], timeout_s: float) -> dict[str, int]:
        """Free engine memory on every replica; bytes freed by tag."""
        freed = dict.fromkeys(tags, 0)
        for rank, leader in self._leaders.items():
            with naming(rank):
                for tag, nbytes in leader.release(tags, timeout_s).items():
                    freed[tag] += nbytes
            if self._states[rank].serving:
                self._advance(rank, Outdated())
        return freed

    def resume(self, tags: Sequence[str], timeout_s: float) -> None:
        """Allocate engine memory again on every replica."""
        for rank, leader in self._leaders.items():
            with naming(rank):
                leader.resume(tags, timeout_s)

    def begin(self, version: PolicyVersion, replicas: Sequence[int]) -> None:
        """`version` is about to be loaded into these replicas, and into no others."""
        for rank in replicas:
            self._advance(rank, Begin(version))

    def commit(self, version: PolicyVersion, timeout_s: float) -> None:
        """Every replica that received `version` serves it from here on."""
        replicas = [rank for rank in self._leaders if self._receives(rank)]
        for rank in replicas:
            with naming(rank):
                self._leaders[rank].commit(version, timeout_s)
        for rank in replicas:
            self._advance(rank, Received(version), Verified(version), Commit(version))
            if rank in self._late:
                self._late.remove(rank)
                address = self._replicas[rank].address
                _logger.info(
                    "Rollout replica joined: %s", kv(replica=rank, address=address, version=version)
                )

    def live_digests(self, replica: int, timeout_s: float) -> list[dict[str, str]]:
        """What the ranks of a replica compute with: digests by run-time name, in rank order."""
        leader = self._leaders[replica]
        if not isinstance(leader, SupportsLiveDigests):
            raise VerificationError(f"rollout.name={self.name} has no live digests")
        with naming(replica):
            return leader.live_digests(timeout_s)

    def live_content(
        self, replica: int, tp_rank: int, name: str, start: int, timeout_s: float
    ) -> LiveContent:
        """A piece of a tensor that one rank of a replica computes with, from byte `start` on."""
        leader = self._leaders[replica]
        if not isinstance(leader, SupportsLiveContent):
            raise VerificationError(f"rollout.name={self.name} does not show its live tensors")
        with naming(replica):
            return leader.live_content(tp_rank, name, start, timeout_s)

    def fence(self, reason: str, timeout_s: float, replicas: Sequence[int] | None = None) -> None:
        """These replicas, or all, answer no more; one that cannot be told is logged."""
        for rank in list(self._leaders) if replicas is None else replicas:
            self._advance(rank, Failed(reason))
            try:
                self._leaders[rank].fence(reason, timeout_s)
            except (MiniRLError, TimeoutError) as error:
                _logger.warning("replica %d could not be fenced: %s", rank, error)

    def dead(self, replica: int) -> str | None:
        """Why a replica does not do what every living one does at once; None if it does.

        It is asked for something that goes through its server to its engine.
        """
        try:
            self._leaders[replica].clear_kv_cache(_ANSWERS_S)
        except (MiniRLError, TimeoutError) as error:
            return told(error)
        return None

    def give_up(self, replica: int, reason: str) -> None:
        """Do without a replica from here on: fenced, or stopped if it cannot be fenced."""
        leader = self._leaders.pop(replica)
        self.given_up[replica] = reason
        self._late.discard(replica)
        self._advance(replica, Failed(reason))
        try:
            leader.fence(reason, _ANSWERS_S)
        except (MiniRLError, TimeoutError):
            self._stop(replica, _ANSWERS_S)
        left = sorted(self._leaders)
        _logger.warning("Rollout replica given up: %s", kv(replica=replica, left=left, why=reason))

    def shutdown(self, timeout_s: float) -> None:
        """Stop every server. Idempotent; one that does not stop is logged and killed later."""
        for rank in range(len(self._replicas)):
            self._stop(rank, timeout_s)
        # Their servers are gone, which ends the starts under way: not while Ray is shut down.
        wait([start.outcome for start in self._starts], _START_ENDS_S)
        for rank in sorted(self._late):
            _logger.warning("replica %d had not joined when the run ended", rank)
        for held in (self._replicas, self._starts, self._states, self._leaders, self._late):
            held.clear()

    def _stop(self, replica: int, timeout_s: float) -> None:
        try:
            self._replicas[replica].shutdown(timeout_s)
        except (MiniRLError, TimeoutError) as error:
            _logger.warning("replica %d did not stop: %s", replica, error)

    def _receives(self, replica: int) -> bool:
        return self._states[replica].phase is Phase.RECEIVING

    def _advance(self, replica: int, *events: Event) -> None:
        for event in events:
            self._states[replica], _ = advance(self._states[replica], event)
