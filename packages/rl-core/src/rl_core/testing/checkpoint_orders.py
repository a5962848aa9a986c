"""What a test asks of the process of one rank, and what it hears back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_core.errors import MiniRLError
from rl_core.interfaces import TransferReport
from rl_core.metadata import Manifest, TensorMeta
from rl_core.testing.checkpoint_recipe import WeightSource


class ForeignError(AssertionError):
    """An engine raised something that is not of `rl_core.errors`; the text is its traceback."""


@dataclass(frozen=True)
class Mishap:
    """Something that happens to a rank at one tensor (senders) or lease (receivers).

    Attributes:
        at: number of the tensor or lease, from 0.
        kind: `die` (the process ends at once), `raise` (the stream or the consumer fails), `stall`
            (nothing happens for `seconds`), `cancel` (the rank's own token), or `abort` (the
            rank's own engine is aborted, from another thread).
        seconds: length of a stall.
    """

    at: int
    kind: str
    seconds: float = 0.0


@dataclass(frozen=True)
class SendOrder:
    """One call of `send_weights`.

    Attributes:
        weights: what the stream yields.
        manifest: what is announced.
        deadline_s: seconds from the call.
        mishap: what goes wrong in the stream.
    """

    weights: WeightSource
    manifest: Manifest
    deadline_s: float
    mishap: Mishap | None = None


@dataclass(frozen=True)
class ReceiveOrder:
    """One call of `receive_weights`, consumed to its end.

    Attributes:
        manifest: what is expected.
        deadline_s: seconds from the call.
        mishap: what goes wrong inside a lease.
        hold_s: seconds that each lease is held.
        flip: name of a tensor in which a byte is flipped just before it is checked.
        keep_open: ask for the second lease while the first one is still open.
        leave_at: number of the lease after which the consumer goes away.
    """

    manifest: Manifest
    deadline_s: float
    mishap: Mishap | None = None
    hold_s: float = 0.0
    flip: str | None = None
    keep_open: bool = False
    leave_at: int | None = None


@dataclass
class Sent:
    """How a call of `send_weights` ended.

    Attributes:
        report: its result.
        error: what it raised instead.
        drawn: tensors taken from the stream.
        exhausted: whether the stream was iterated to its end (or to where it raised).
        ended_at: `time.monotonic()` at the end; comparable between processes of one host.
        extra_bytes: peak of the resident memory over what it was when the meter started.
    """

    report: TransferReport | None = None
    error: MiniRLError | ForeignError | None = None
    drawn: int = 0
    exhausted: bool = False
    ended_at: float = 0.0
    extra_bytes: int = 0


@dataclass
class Received:
    """How one iteration over `receive_weights` ended.

    Attributes:
        metas: metadata of the tensors, as they came.
        digests: recomputed inside the lease, by name.
        carried: digests that came with the tensors, by name.
        touched: tensors that changed while their lease was open.
        error: what was raised.
        leases: number of leases.
        last_exit_at: `time.monotonic()` at which the last lease was left.
        ended_at: `time.monotonic()` at the end.
        extra_bytes: peak of the resident memory over what it was when the meter started.
    """

    metas: list[TensorMeta] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    carried: dict[str, str | None] = field(default_factory=dict)
    touched: list[str] = field(default_factory=list)
    error: MiniRLError | ForeignError | None = None
    leases: int = 0
    last_exit_at: float = 0.0
    ended_at: float = 0.0
    extra_bytes: int = 0


@dataclass(frozen=True)
class Held:
    """What a process holds.

    Attributes:
        descriptors: open files.
        threads: threads.
        listening: addresses of its listening TCP sockets, as `host:port`.
        shared: bytes of shared memory mapped into it.
        resident: bytes of memory, all kinds.
    """

    descriptors: int
    threads: int
    listening: tuple[str, ...]
    shared: int
    resident: int


Options = Mapping[str, object]
"""`checkpoint_engine.options` of a backend."""
