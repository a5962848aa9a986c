"""What a train engine, a checkpoint engine and a rollout engine promise to each other.

Only types cross package borders. Everything here is synchronous: a blocking call takes a
`Deadline` (or a timeout in seconds, where it crosses a process border) and is run by its caller in
a worker thread if it must not block. This module imports no torch; tensors are annotations only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from rl_core.versions import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from torch import Tensor

    from rl_core.deadlines import CancelToken, Deadline
    from rl_core.metadata import Manifest, TensorMeta
    from rl_core.trajectory import Completion, GenerateRequest, LogProbs, TrainSample

TensorStream: TypeAlias = "Iterator[tuple[TensorMeta, Tensor]]"
"""Tensors of one version in stream order; each is valid until the next one is asked for."""

API_VERSION = 1
"""Version of these interfaces; a plug-in declares the one it was written for."""


# --------------------------------------------------------------------------- processes


class RankPlace(msgspec.Struct, frozen=True):
    """Where one rank of a process group runs.

    Attributes:
        rank: global rank.
        world_size: number of ranks.
        local_rank: rank on its node; index of its device there.
        master_address: host of rank 0.
        master_port: free TCP port on that host.
        device: `cpu`, `cuda` or `npu`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 29500
    device: str = "cpu"


class RolloutMode(StrEnum):
    """Whether a replica shares its devices with actor ranks."""

    HYBRID = "hybrid"
    STANDALONE = "standalone"


class Placement(msgspec.Struct, frozen=True):
    """Where one node's part of a rollout replica runs.

    Attributes:
        replica_rank: number of the replica.
        mode: `hybrid` shares devices with actor ranks, `standalone` owns them.
        tp_size: tensor-parallel ranks of the replica.
        node_rank: number of this node within the replica.
        nnodes: nodes that the replica spans.
        node_id: launcher's name of the node to start on; None lets the launcher choose.
        host: address that the HTTP server binds and announces; never a wildcard.
        device: `cpu`, `cuda` or `npu`.
        visible_devices: vendor device ids, in rank order; empty on cpu.
    """

    replica_rank: int = 0
    mode: RolloutMode = RolloutMode.HYBRID
    tp_size: int = 1
    node_rank: int = 0
    nnodes: int = 1
    node_id: str | None = None
    host: str = "127.0.0.1"
    device: str = "cpu"
    visible_devices: tuple[str, ...] = ()


class Pending(Protocol):
    """A call under way in another process."""

    def result(self, timeout: float) -> Any:
        """Its value, or the error it raised there; TimeoutError after `timeout` seconds."""
        ...


class Handle(Protocol):
    """An object living in another process. Picklable, so that ranks can be given one."""

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Start `method` there; async methods of one object run concurrently."""
        ...

    def call(self, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """`submit` and wait for the result."""
        ...

    def kill(self) -> None:
        """End the process and everything it started. Idempotent."""
        ...


class Launcher(Protocol):
    """Starts objects in processes of their own (Ray actors, subprocesses)."""

    def launch(
        self, cls: str, kwargs: Mapping[str, Any], env: Mapping[str, str], placement: Placement
    ) -> Handle:
        """Create `cls` (`module:Class`) with `kwargs` in a new process with `env` added."""
        ...


# --------------------------------------------------------------------------- training


class TrainEngine(ABC):
    """Holds and updates the policy; one instance in each actor rank's process.

    Every method is collective unless it says otherwise: all ranks call it, in the same order.
    """

    @abstractmethod
    def initialize(self) -> None:
        """Join the process group, load and shard the model, create the optimizer."""

    @abstractmethod
    def compute_log_prob(self, samples: Sequence[TrainSample]) -> list[LogProbs]:
        """Log-probabilities and entropies of this rank's samples under the current policy."""

    @abstractmethod
    def update_policy(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """One iteration (all epochs and mini-batches) on this rank's samples; its metrics.

        Metrics are already reduced over the ranks: `loss`, `grad_norm`, `lr`, `kl`,
        `entropy`, `clip_fraction`, and `optimizer_steps`.
        """

    @abstractmethod
    def manifest(self, version: PolicyVersion, run_id: str) -> Manifest:
        """Structure of what `get_per_tensor_param` will yield. Local, and equal on all ranks."""

    @abstractmethod
    def get_per_tensor_param(self) -> TensorStream:
        """Full tensors under their Hugging Face names, one gathered at a time.

        Every rank iterates to the end, also after a failure elsewhere (drain): each step is a
        collective. A tensor is valid until the next step.
        """

    @abstractmethod
    def save_checkpoint(self, path: Path) -> None:
        """Sharded training state for resuming (parameters, optimizer, scheduler) under `path`."""

    @abstractmethod
    def load_checkpoint(self, path: Path) -> None:
        """Restore what `save_checkpoint` wrote, also on another number of ranks."""

    @abstractmethod
    def save_pretrained(self, path: Path) -> None:
        """Write a Hugging Face directory (weights, config, tokenizer); rank 0 writes."""

    @abstractmethod
    def offload(self) -> None:
        """Move parameters and optimizer state off the device, where configured. Local."""

    @abstractmethod
    def onload(self) -> None:
        """Bring them back. Local."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the process group and free everything. Idempotent."""


@dataclass(frozen=True)
class TrainBackend:
    """What a package announces under the entry-point group `minirl.train_engines`.

    Attributes:
        name: value of `actor.engine_config.backend` that selects it.
        config_cls: `module:Class` of its dataclass, constructed from the `actor` and
            `algorithm` sections of the configuration.
        engine: `module:Class` of the `TrainEngine`, called with (config, RankPlace).
        api_version: `API_VERSION` it was written for.
    """

    name: str
    config_cls: str
    engine: str
    api_version: int = API_VERSION


# --------------------------------------------------------------------------- leases


@dataclass(frozen=True)
class LeasedTensor:
    """A whole tensor lent by a bucket.

    Attributes:
        meta: its name, shape and dtype.
        tensor: the values; valid only inside the lease.
        digest: content digest computed at the source, or None without light verification.
    """

    meta: TensorMeta
    tensor: Tensor
    digest: str | None = None


@dataclass
class BucketLease:
    """Tensors lent to a `with` block; their buffer is reused after its exit, not before.

    Attributes:
        entries: what is lent; empty after the exit.
        on_exit: called at the exit.
        on_error: told, before that, what the block raised, so that an engine can tell its peers.
    """

    entries: Sequence[LeasedTensor]
    on_exit: Callable[[], None] = field(default=lambda: None)
    on_error: Callable[[BaseException], None] = field(default=lambda _: None)

    def __enter__(self) -> Sequence[LeasedTensor]:
        return self.entries

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.entries = ()
        if error is not None:
            self.on_error(error)
        self.on_exit()


# --------------------------------------------------------------------------- transfer


class Endpoint(msgspec.Struct, frozen=True):
    """How the other ranks reach this one, and what it will agree to.

    Attributes:
        role: `sender` or `receiver`.
        rank: rank within its role.
        address: transport address of the control channel.
        properties: the backend's own, as text.
    """

    role: str
    rank: int
    address: str
    properties: dict[str, str] = {}


class Place(msgspec.Struct, frozen=True):
    """One rank's place in a transfer topology.

    Attributes:
        rank: rank in the transfer group; -1 takes no part in the bytes (but must drain).
        world_size: ranks in the group.
        endpoints: of every rank in the group, in order.
        predecessor: rank that this one reads from, or -1.
    """

    rank: int
    world_size: int
    endpoints: tuple[Endpoint, ...]
    predecessor: int = -1


class TransferReport(msgspec.Struct, frozen=True):
    """What one sender did.

    Attributes:
        payload_bytes: bytes of tensors, without padding.
        buckets: buckets sent.
        seconds: by phase: `gather`, `pack`, `wire`, `ack`.
        weights_digest: digest of digests, or None without light verification.
    """

    payload_bytes: int
    buckets: int
    seconds: dict[str, float]
    weights_digest: str | None = None


class TransferRole(msgspec.Struct, frozen=True):
    """Who an instance of a checkpoint engine is, and what all instances of a run agree on.

    Attributes:
        role: `sender` (actor ranks; rank 0 sends the bytes, the others drain) or `receiver`
            (rollout ranks).
        rank: rank within its role.
        device: `cpu`, `cuda` or `npu`.
        host: address of the interface that control and data sockets bind to.
        key: secret of the run, handed out by the controller; authenticates every message.
        run_id: the run; a version of another run is refused.
        bucket_megabytes: size of a bucket in MiB; never more than the payload is allocated.
        digest_kind: kind of the content digests that travel with the tensors, or None.
    """

    role: str
    rank: int
    device: str = "cpu"
    host: str = "127.0.0.1"
    key: bytes = b""
    run_id: str = ""
    bucket_megabytes: float = 2048.0
    digest_kind: str | None = None


class CheckpointEngine(ABC):
    """Moves one version of the weights from actor ranks to rollout ranks.

    Knows nothing of FSDP, vLLM or Ray. Each blocking call runs in one worker thread of its
    process, so that aborts and deadlines fire while a transfer blocks.

    Every sync is `prepare`, `build_process_group`, `send_weights` or `receive_weights`, `finalize`.
    What need not be built again is kept: as long as no sync failed and the members are the same,
    `prepare` returns an equal endpoint and `build_process_group` nothing to do. After a failure
    the endpoint differs, so that every member builds anew. A version counts as received once it
    was finalized with success; from then on it and all older ones are refused.
    """

    @abstractmethod
    def prepare(self) -> Endpoint:
        """Allocate buffers and open the control channel. Both sides."""

    @classmethod
    @abstractmethod
    def build_topology(
        cls, senders: Sequence[Endpoint], receivers: Sequence[Endpoint]
    ) -> dict[str, list[Place]]:
        """Places by role, in rank order. Pure: needs no device and no network."""

    @abstractmethod
    def build_process_group(self, place: Place, deadline: Deadline) -> None:
        """Connect to the other ranks. Collective."""

    @abstractmethod
    def send_weights(
        self, weights: TensorStream, manifest: Manifest, deadline: Deadline, cancel: CancelToken
    ) -> TransferReport:
        """Send every tensor of the stream; drains the stream also when it fails. Senders."""

    @abstractmethod
    def receive_weights(
        self, manifest: Manifest, deadline: Deadline, cancel: CancelToken
    ) -> Iterator[BucketLease]:
        """Leases in stream order, each tensor whole. Receivers."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End a transfer under way from another thread; the peers are told."""

    @abstractmethod
    def finalize(self, success: bool) -> None:
        """Close this sync. Idempotent, also after a failure; buffers may be kept."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give back buffers, sockets and groups. Idempotent; no call may follow."""


@dataclass(frozen=True)
class CheckpointBackend:
    """What a package announces under the entry-point group `minirl.checkpoint_engines`.

    Attributes:
        name: value of `checkpoint_engine.backend` that selects it.
        config_cls: `module:Class` of its dataclass, constructed from
            `checkpoint_engine.options`.
        engine: `module:Class` of the `CheckpointEngine`, called with (config, TransferRole).
        api_version: `API_VERSION` it was written for.
    """

    name: str
    config_cls: str
    engine: str
    api_version: int = API_VERSION


# --------------------------------------------------------------------------- rollout


class LoadReport(msgspec.Struct, frozen=True):
    """What one engine rank loaded.

    Attributes:
        version: version that is now loaded, not yet committed.
        tensors: tensors received.
        nbytes: their payload bytes.
        seconds: by phase: `wire`, `load`, `post_process`.
        matched: tensors whose digest was recomputed and agreed; 0 without verification.
        weights_digest: digest of digests recomputed by the receiver, or None.
    """

    version: PolicyVersion
    tensors: int
    nbytes: int
    seconds: dict[str, float] = {}
    matched: int = 0
    weights_digest: str | None = None


class PauseMode(StrEnum):
    """What happens to requests in flight when a replica is paused."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class RolloutAdapter(ABC):
    """Puts weights into one rank of a real engine, and reaches its replica for the rest.

    One adapter for each (replica, tensor-parallel rank), in the process that feeds that rank.
    `update_weights` is called on all ranks of a replica at the same time; every other call
    concerns the whole replica and is made once, by the adapter of rank 0. It connects lazily.
    """

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
        """Refuse all requests, with `reason`, until the next commit."""

    @abstractmethod
    def clear_kv_cache(self, timeout: float) -> None:
        """Drop cached prefixes; RolloutError unless the engine confirms it."""

    @abstractmethod
    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop scheduling; requests in flight end or stay as `mode` says, new ones queue."""

    @abstractmethod
    def continue_(self, timeout: float) -> None:
        """Go on after `pause`."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest], timeout: float) -> list[Completion]:
        """Complete all requests, in order. ReplicaFencedError if the replica is fenced."""

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
        """Stop the server and every process it started. Idempotent."""


@dataclass(frozen=True)
class RolloutBackend:
    """What a package announces under the entry-point group `minirl.rollout_backends`.

    The heavy parts are `module:Class` strings, so that loading it imports no engine.

    Attributes:
        name: value of `rollout.name` that selects it.
        config_cls: its dataclass, constructed from the `rollout` section.
        replica: `Replica`, called with (config, Launcher, Placement).
        adapter: `RolloutAdapter`, called with (server Handle, tp_rank, config).
        layout: function giving the layout spec of a model config; None until it has one.
        api_version: `API_VERSION` it was written for.
        engine_name: how the log spells the engine.
    """

    name: str
    config_cls: str
    replica: str
    adapter: str
    layout: str | None = None
    api_version: int = API_VERSION
    engine_name: str = ""


# --------------------------------------------------------------------------- capabilities


@runtime_checkable
class SupportsReference(Protocol):
    """A train engine that keeps the policy as it was loaded, for a KL term."""

    def compute_ref_log_prob(self, samples: Sequence[TrainSample]) -> list[list[float]]:
        """Log-probabilities of this rank's samples under the frozen reference. Collective."""
        ...


@runtime_checkable
class SupportsFileCheck(Protocol):
    """A backend configuration that can tell early whether its files are usable."""

    def check_files(self) -> object:
        """Read headers and sizes only; ConfigError names what is wrong with which file."""
        ...


@runtime_checkable
class SupportsCheckpointPath(Protocol):
    """A checkpoint engine whose receivers can load a directory themselves."""

    def get_checkpoint_path(self, manifest: Manifest, deadline: Deadline) -> Path:
        """The complete, checked directory of this version."""
        ...


@runtime_checkable
class SupportsLiveDigests(Protocol):
    """A rollout adapter whose engine can digest what it really holds."""

    def live_digests(self, timeout: float) -> list[dict[str, str]]:
        """Digests by run-time tensor name, one mapping per tensor-parallel rank."""
        ...
