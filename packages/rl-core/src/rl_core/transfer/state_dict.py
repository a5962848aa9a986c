"""A state dict from one process to others, over any checkpoint engine: a sync from end to end.

What an orchestrator does for many ranks, for somebody who has two processes and a pipe between
them. The processes have to trust each other: a `multiprocessing` pipe unpickles what it is sent.
"""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rl_core import digests
from rl_core.deadlines import CancelToken
from rl_core.errors import MiniRLError, PeerLostError, TransferTimeoutError
from rl_core.metadata import Manifest
from rl_core.torch import content_digest, meta_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from rl_core.deadlines import Deadline
    from rl_core.interfaces import (
        CheckpointEngine,
        Endpoint,
        LeasedTensor,
        Place,
        TransferReport,
    )
    from rl_core.versions import PolicyVersion


class Pipe(Protocol):
    """One end of a duplex `multiprocessing` pipe."""

    def send(self, obj: Any) -> None:
        """Send a picklable object."""

    def recv(self) -> Any:
        """The next object from the other end."""

    def poll(self, timeout: float) -> bool:
        """Whether there is one, after at most `timeout` seconds."""


def send_state_dict(
    engine: CheckpointEngine,
    state: Mapping[str, Tensor],
    version: PolicyVersion,
    pipes: Sequence[Pipe],
    deadline: Deadline,
) -> TransferReport:
    """Send `state` as `version` to the receivers at the other ends of the pipes, in rank order.

    Sender, rank 0 of one. The engine can be used again, also after a failure; `shutdown` is the
    caller's.

    Errors: those of the engine; TransferTimeoutError or PeerLostError naming a receiver.
    """
    manifest = Manifest(version, tuple(meta_of(*item) for item in state.items()))
    with _finalized(engine):
        mine = engine.prepare()
        calls = [_latest(pipe, f"receiver {rank}", deadline) for rank, pipe in enumerate(pipes)]
        places = engine.build_topology([mine], [call.endpoint for call in calls])
        for rank, (pipe, call) in enumerate(zip(pipes, calls, strict=True)):
            answer = _Answer(call.token, places["receiver"][rank], manifest)
            _send(pipe, answer, f"receiver {rank}", deadline)
        engine.build_process_group(places["sender"][0], deadline)
        weights = zip(manifest.tensors, state.values(), strict=True)
        return engine.send_weights(weights, manifest, deadline, CancelToken())


def receive_state_dict(
    engine: CheckpointEngine, pipe: Pipe, deadline: Deadline
) -> tuple[PolicyVersion, dict[str, Tensor]]:
    """The version and copies of all tensors that `send_state_dict` sends. Receiver.

    Where digests travel, they are recomputed on the copies.

    Errors: those of the engine; DigestMismatchError naming a tensor that is not what was sent;
    TransferTimeoutError or PeerLostError naming the sender.
    """
    with _finalized(engine):
        call = _Call(secrets.token_hex(8), engine.prepare())
        _send(pipe, call, "the sender", deadline)
        answer = _next(pipe, "the sender", deadline)
        while answer.token != call.token:  # to an attempt of ours that was given up
            answer = _next(pipe, "the sender", deadline)
        engine.build_process_group(answer.place, deadline)
        state: dict[str, Tensor] = {}
        for lease in engine.receive_weights(answer.manifest, deadline, CancelToken()):
            with lease as entries:  # their memory is used again after the block
                state.update((entry.meta.name, _copied(entry)) for entry in entries)
    return answer.manifest.version, state


def _copied(entry: LeasedTensor) -> Tensor:
    """What the caller gets; its digest is recomputed, not that of the buffer it came from."""
    copy = entry.tensor.clone()
    if entry.digest is not None:
        found = content_digest(entry.meta, copy, digests.kind_of(entry.digest))
        digests.check(entry.meta.name, entry.digest, found)
    return copy


@dataclass(frozen=True)
class _Call:
    """A receiver says where it is; `token` is never used again."""

    token: str
    endpoint: Endpoint


@dataclass(frozen=True)
class _Answer:
    """What the sender makes of the call with this token."""

    token: str
    place: Place
    manifest: Manifest


@contextmanager
def _finalized(engine: CheckpointEngine) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(MiniRLError):  # the cause is what matters
            engine.finalize(success=False)
        raise
    engine.finalize(success=True)


def _latest(pipe: Pipe, who: str, deadline: Deadline) -> Any:
    """The last call in the pipe: those before it were given up by the receiver."""
    call = _next(pipe, who, deadline)
    while pipe.poll(0):
        call = _next(pipe, who, deadline)
    return call


def _next(pipe: Pipe, who: str, deadline: Deadline) -> Any:
    try:
        if pipe.poll(max(0.0, deadline.remaining())):
            return pipe.recv()
    except (EOFError, OSError) as error:
        raise PeerLostError(f"{who} has closed the pipe") from error
    raise TransferTimeoutError(f"deadline passed while waiting for {who}")


def _send(pipe: Pipe, message: _Call | _Answer, who: str, deadline: Deadline) -> None:
    """In a thread, since a pipe blocks when it is full and nobody reads at the other end."""
    outcome: Future[None] = Future()

    def send() -> None:
        try:
            pipe.send(message)
            outcome.set_result(None)
        except (OSError, ValueError) as error:
            outcome.set_exception(error)

    threading.Thread(target=send, name="state-dict-pipe", daemon=True).start()
    try:
        outcome.result(max(0.0, deadline.remaining()))
    except TimeoutError as error:
        raise TransferTimeoutError(f"deadline passed: {who} does not read its pipe") from error
    except (OSError, ValueError) as error:
        raise PeerLostError(f"{who} has closed the pipe") from error
