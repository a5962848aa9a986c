"""What a rollout backend promises: replicas that serve the policy, and adapters that feed them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from rl_core.interfaces.version import API_VERSION
from rl_core.tensor_counts import TensorCounts
from rl_core.versions import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rl_core.deadlines import Deadline
    from rl_core.interfaces.leases import BucketLease
    from rl_core.interfaces.placement import Handle
    from rl_core.metadata import Manifest
    from rl_core.trajectory import Completion, GenerateRequest


class LoadReport(msgspec.Struct, frozen=True):
    """What one engine rank loaded.

    Attributes:
        version: version that is now loaded, not yet committed.
        tensors: tensors received.
        nbytes: their payload bytes.
        seconds: by phase: `wire`, `load`, `post_process`.
        matched: tensors whose digest was recomputed and agreed; 0 without verification.
        weights_digest: digest of digests recomputed by the receiver, or None.
        mismatched: tensors whose digest differed; an adapter raises then, and reports what it saw.
        missing: tensors of the manifest that did not come.
        unexpected: tensors that came and are not in the manifest.
    """

    version: PolicyVersion
    tensors: int
    nbytes: int
    seconds: dict[str, float] = {}
    matched: int = 0
    weights_digest: str | None = None
    mismatched: int = 0
    missing: int = 0
    unexpected: int = 0

    @property
    def counts(self) -> TensorCounts:
        """All counts; what came and was neither matched nor mismatched is unverifiable."""
        unverifiable = max(0, self.tensors - self.matched - self.mismatched)
        return TensorCounts(
            self.matched, self.mismatched, self.missing, self.unexpected, unverifiable
        )


class LiveContent(msgspec.Struct, frozen=True):
    """A piece of one tensor that an engine rank computes with.

    Attributes:
        shape: of the whole tensor.
        dtype: of the tensor.
        data: bytes in row-major order, from where they were asked for; empty beyond the end.
    """

    shape: tuple[int, ...]
    dtype: str
    data: bytes


class PauseMode(StrEnum):
    """What happens to requests in flight when a replica is paused, or an update begins.

    `abort`: they end with what they have. `wait`: they finish first. `keep`: they go on afterwards,
    with their KV cache computed again, under another version if one was committed meanwhile.
    `in_place`: the same, with the KV cache that they have, so that tokens of the new version may
    follow from KV of older ones; a backend without it refuses it with a RolloutError.

    Requests that are kept go on when the pause is over, so that nobody can `wait` for them before:
    that is refused with a LifecycleError.
    """

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"
    IN_PLACE = "in_place"

    @property
    def keeps(self) -> bool:
        """Whether requests in flight go on afterwards."""
        return self in (PauseMode.KEEP, PauseMode.IN_PLACE)


class RolloutAdapter(ABC):
    """Puts weights into one rank of a real engine, and reaches its replica for the rest.

    One adapter for each (replica, tensor-parallel rank), in the process that feeds that rank.
    `update_weights` is called on all ranks of a replica at the same time; every other call
    concerns the whole replica and is made once, by the adapter of rank 0. It connects lazily.

    Attributes:
        on_update: what happens to requests in flight when an update begins, unless somebody has
            paused the replica. With `wait` their end counts towards the update's deadline. Those
            that are kept go on under the new version, from an empty KV cache, and say from which
            token on; if the update fails, they end.
    """

    on_update: PauseMode = PauseMode.ABORT

    @abstractmethod
    def release(self, tags: Sequence[str], timeout: float) -> dict[str, int]:
        """Free the memory of `kv_cache` and/or `weights`; bytes freed by tag, over all ranks.

        Requests in flight are aborted first. A tag that the engine cannot free gives 0.
        """

    @abstractmethod
    def resume(self, tags: Sequence[str], timeout: float) -> None:
        """Allocate again what `release` freed. Weights come back empty: sync before serving."""

    @abstractmethod
    def update_weights(
        self, leases: Iterator[BucketLease], manifest: Manifest, deadline: Deadline
    ) -> LoadReport:
        """Load one complete version into this rank; the replica is then LOADED, not serving.

        Errors: `StaleVersionError` (an old or repeated version) and `LifecycleError` (another
        update is under way) refuse the update before anything is touched, and the replica goes
        on as it was. Any other `WeightSyncError` or `VerificationError`, and whatever the leases
        raise, leaves the replica FENCED, with the error as its reason.
        """

    @abstractmethod
    def update_weights_from_disk(
        self, path: Path, manifest: Manifest, deadline: Deadline
    ) -> LoadReport:
        """As `update_weights`, from a Hugging Face directory. Rank 0 calls it for the replica."""

    @abstractmethod
    def commit(self, version: PolicyVersion, timeout: float) -> None:
        """Flush the KV cache, and let requests in: they are served by `version` from here on."""

    @abstractmethod
    def fence(self, reason: str, timeout: float) -> None:
        """Refuse all requests, with `reason`, until the next commit; those in flight end.

        So do requests that a pause had queued: without a token, or with a RolloutError.
        """

    @abstractmethod
    def clear_kv_cache(self, timeout: float) -> None:
        """Drop cached prefixes; RolloutError unless the engine confirms it."""

    @abstractmethod
    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop scheduling; requests in flight end or stay as `mode` says, new ones queue.

        A pause that fails holds nothing; an earlier one still does.

        Errors: RolloutError (the engine has no such mode, or fails); with `wait`
        TransferTimeoutError (they have not ended in time) and LifecycleError (they are kept, or
        another `pause` or `continue_` came meanwhile).
        """

    @abstractmethod
    def continue_(self, timeout: float) -> None:
        """Go on after `pause`."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest], timeout: float) -> list[Completion]:
        """Complete all requests, in order; ReplicaFencedError if the replica is fenced.

        A request for several completions (`sampling.n`) is answered by as many, one after the
        other, as its `samples()` would be.
        """

    @abstractmethod
    def committed_version(self, timeout: float) -> PolicyVersion | None:
        """The version that is being served; None before the first commit or while fenced."""


class Replica(ABC):
    """One rollout replica: starts its server through a Launcher, owns its life cycle."""

    @abstractmethod
    def warm_up(self) -> None:
        """Create the server's process and let it import the engine, without waiting for it.

        Optional before `start`, which is quicker then: importing an engine takes a core for many
        seconds, in which other parts can load.
        """

    @abstractmethod
    def start(self, deadline: Deadline) -> None:
        """Start the server and wait until it answers. It is JOINING: no request is served."""

    @property
    @abstractmethod
    def address(self) -> str:
        """`host:port` of the OpenAI-compatible HTTP server."""

    @property
    @abstractmethod
    def server(self) -> Handle:
        """The server, for adapters."""

    @abstractmethod
    def shutdown(self, timeout: float) -> None:
        """Stop the server and every process it started. Idempotent.

        A `start` under way in another thread fails then.
        """


@dataclass(frozen=True)
class RolloutBackend:
    """What a package announces under the entry-point group `minirl.rollout_backends`.

    The heavy parts are `module:Class` strings, so that loading it imports no engine.

    Attributes:
        name: value of `rollout.name` that selects it.
        config_cls: its dataclass, constructed from the `rollout` section.
        replica: `Replica`, called with (config, Launcher, Placement).
        adapter: `RolloutAdapter`, called with (server Handle, tp_rank, config).
        layout: function giving the `LayoutSpec` of (`config.json` as a mapping, config, device);
            None if it has no tables.
        probe: function giving the `LiveWeights` of the engine behind (`host:port`, timeout in
            seconds), whoever started it; None from it: another kind of server listens there.
            RolloutError if nobody does, or if it cannot tell. None if the backend cannot ask.
        api_version: `API_VERSION` it was written for.
        engine_name: how the log spells the engine.
    """

    name: str
    config_cls: str
    replica: str
    adapter: str
    layout: str | None = None
    probe: str | None = None
    api_version: int = API_VERSION
    engine_name: str = ""


class LiveWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a running engine holds, and how it runs as far as its layout depends on that.

    Attributes:
        engine: name of its rollout backend.
        device: `cpu`, or an accelerator.
        settings: fields of the backend's configuration, without `local_path`.
        ranks: digests by run-time tensor name, one mapping per tensor-parallel rank.
        split: other ways in which the model is spread, such as `pipeline_parallel_size`, and over
            how many; layouts know tensor parallelism only.
    """

    engine: str
    device: str
    settings: dict[str, Any]
    ranks: list[dict[str, str]]
    split: dict[str, int] = {}


@runtime_checkable
class SupportsProgress(Protocol):
    """A rollout adapter whose replica tells how far it is with what it was asked for."""

    def tokens_made(self, timeout: float) -> int:
        """Tokens since the server began, of all requests, also of those under way.

        As far as the engine has told its server: it may do so only after some tens of tokens.
        """
        ...


@runtime_checkable
class SupportsEarlyCompletions(Protocol):
    """A rollout adapter whose replica tells what has ended before its whole call has."""

    def finished(self, request_ids: Sequence[str], wait: float, timeout: float) -> list[Completion]:
        """Completions of those among the requests that have ended while their call goes on.

        They are what the call will return, aborted ones included. Comes as soon as there is one,
        at the latest after `wait` seconds, with nothing then. Nothing, and at once, if none of
        the requests belongs to a `generate` call under way: that is not known here yet, or its
        own answer has them. Asking again gives them again, so whoever asks leaves out what he has.

        Args:
            request_ids: of the requests, or of their samples (`GenerateRequest.samples`), each
                unique among those under way.
            wait: seconds to wait for the first of them to end.
            timeout: seconds for the answer, waiting included; RolloutError after that.
        """
        ...


@runtime_checkable
class SupportsLiveDigests(Protocol):
    """A rollout adapter whose engine can digest what it really holds."""

    def live_digests(self, timeout: float) -> list[dict[str, str]]:
        """Digests by run-time tensor name, one mapping per tensor-parallel rank."""
        ...


@runtime_checkable
class SupportsLiveContent(Protocol):
    """A rollout adapter whose engine can show what it really holds."""

    def live_content(self, tp_rank: int, name: str, start: int, timeout: float) -> LiveContent:
        """A piece of a tensor of one rank, by run-time name, from byte `start` on.

        As many bytes as the engine likes to send at once. VerificationError naming a tensor that
        is not there.
        """
        ...


@runtime_checkable
class SupportsEngineCheck(Protocol):
    """A rollout configuration that can tell early whether the installed engine will take it."""

    def check_engine(self, device: str) -> None:
        """Look at the engine without importing it.

        Errors: ConfigError (a value that cannot work), IncompatibleVersionError.
        """
        ...
