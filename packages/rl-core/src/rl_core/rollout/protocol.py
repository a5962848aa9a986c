"""What adapter, server and engine worker say to each other during a weight update.

The adapter opens a socket and offers it to the server; the server hands the offers of all ranks
to the engine's workers in one call; each worker connects to its adapter and reads the stream.
Everything is msgpack with strict validation; nothing is unpickled.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

from rl_core import errors
from rl_core.buckets import Slot
from rl_core.errors import DigestMismatchError, MiniRLError, WeightSyncError
from rl_core.interfaces import LoadReport, PauseMode
from rl_core.metadata import Manifest, TensorMeta, Trailer
from rl_core.tensor_counts import TensorCounts

KV_CACHE = "kv_cache"
WEIGHTS = "weights"
TAGS = (KV_CACHE, WEIGHTS)
"""What can be released and resumed."""

# --------------------------------------------------------------------------- adapter -> server


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's adapter is ready to stream a version.

    Attributes:
        tp_rank: engine rank that it feeds.
        address: of its listening socket (`rl_core.channel`).
        key: shared secret of this one stream.
        manifest: the version.
        seconds: how long the whole update may take, from now.
        on_update: what happens to requests in flight; the first rank's counts.
    """

    tp_rank: int
    address: str
    key: bytes
    manifest: Manifest
    seconds: float
    on_update: PauseMode = PauseMode.ABORT


# --------------------------------------------------------------------------- server -> worker


class FromSocket(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Read the weights from an adapter's stream."""

    address: str
    key: bytes


class FromDirectory(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Read the weights from the safetensors files of a directory."""

    path: str


Source: TypeAlias = FromSocket | FromDirectory


class UpdateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's part of an update.

    Attributes:
        source: where the tensors come from.
        manifest: what must come.
        seconds: how long it may take, from now.
        load_path: `bracketed` or `plain`.
        check_finite: refuse NaN and infinity.
    """

    source: Source
    manifest: Manifest
    seconds: float
    load_path: Literal["bracketed", "plain"]
    check_finite: bool = True


class WorkerError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error of this project, as text.

    Attributes:
        kind: name of its class in `rl_core.errors`.
        message: what happened.
        tensors: names of differing tensors, for a digest mismatch.
        counts: the error's, if it has some.
    """

    kind: str
    message: str
    tensors: tuple[str, ...] = ()
    counts: TensorCounts | None = None

    @classmethod
    def of(cls, error: MiniRLError) -> "WorkerError":
        """Describe an error."""
        tensors = tuple(getattr(error, "tensors", ()))
        return cls(type(error).__name__, str(error), tensors, error.counts)

    def rebuild(self) -> MiniRLError:
        """The error again; a class that is not ours becomes a WeightSyncError."""
        kind = getattr(errors, self.kind, None)
        if kind is DigestMismatchError:
            return DigestMismatchError(self.message, self.tensors).counting(self.counts)
        if isinstance(kind, type) and issubclass(kind, MiniRLError):
            return kind(self.message).counting(self.counts)
        return WeightSyncError(self.message).counting(self.counts)


class UpdateResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank's worker answers: a report or an error."""

    report: LoadReport | None = None
    error: WorkerError | None = None


# --------------------------------------------------------------------------- adapter <-> worker


class OpenStream(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """First message of a stream.

    Attributes:
        buffers: number of buffers that the buckets alternate between.
        nbytes: size of each.
        kind: `memfd`, whose descriptors follow, or `cuda`, whose handles are in `handles`.
        handles: one encoded device handle per buffer.
    """

    buffers: Annotated[int, msgspec.Meta(ge=1, le=16)]
    nbytes: Annotated[int, msgspec.Meta(ge=1)]
    kind: Literal["memfd", "cuda"]
    handles: tuple[bytes, ...] = ()


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor, or a run of bytes of one, inside a bucket."""

    meta: TensorMeta
    slot: Slot
    digest: str | None = None


class Bucket(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A filled buffer, to be read until it is acknowledged."""

    number: int
    buffer: int
    pieces: tuple[Piece, ...]


class CloseStream(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All tensors were sent."""

    trailer: Trailer


class AbortStream(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sending side failed."""

    reason: str


class Ack(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The worker no longer needs the buffer of bucket `number`."""

    number: int


FromAdapter: TypeAlias = OpenStream | Bucket | CloseStream | AbortStream
FromWorker: TypeAlias = Ack
