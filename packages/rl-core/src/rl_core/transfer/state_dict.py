"""A state dict from one process to others, over any checkpoint engine: a sync from end to end.

What an orchestrator does for many ranks, for somebody who has two processes and a pipe between
them. The processes have to trust each other: a `multiprocessing` pipe unpickles what it is sent.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rl_core.deadlines import CancelToken
from rl_core.errors import PeerLostError, TransferTimeoutError
from rl_core.metadata import Manifest
from rl_core.torch import meta_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from rl_core.deadlines import Deadline
    from rl_core.interfaces import CheckpointEngine, TransferReport
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

    Sender, rank 0 of one. The engine can be used again; `shutdown` is the caller's.

    Errors: those of the engine; TransferTimeoutError or PeerLostError naming a receiver.
    """
    manifest = Manifest(version, tuple(meta_of(*item) for item in state.items()))
    with _finalized(engine):
        mine = engine.prepare()
        theirs = [_next(pipe, f"receiver {rank}", deadline) for rank, pipe in enumerate(pipes)]
        places = engine.build_topology([mine], theirs)
        for pipe, place in zip(pipes, places["receiver"], strict=True):
            pipe.send((place, manifest))
        engine.build_process_group(places["sender"][0], deadline)
        weights = zip(manifest.tensors, state.values(), strict=True)
        return engine.send_weights(weights, manifest, deadline, CancelToken())


def receive_state_dict(
    engine: CheckpointEngine, pipe: Pipe, deadline: Deadline
) -> tuple[PolicyVersion, dict[str, Tensor]]:
    """The version and copies of all tensors that `send_state_dict` sends. Receiver.

    Errors: those of the engine; TransferTimeoutError or PeerLostError naming the sender.
    """
    with _finalized(engine):
        pipe.send(engine.prepare())
        place, manifest = _next(pipe, "the sender", deadline)
        engine.build_process_group(place, deadline)
        state: dict[str, Tensor] = {}
        for lease in engine.receive_weights(manifest, deadline, CancelToken()):
            with lease as entries:  # their memory is used again after the block
                state.update((entry.meta.name, entry.tensor.clone()) for entry in entries)
    return manifest.version, state


@contextmanager
def _finalized(engine: CheckpointEngine) -> Iterator[None]:
    success = False
    try:
        yield
        success = True
    finally:
        engine.finalize(success)


def _next(pipe: Pipe, who: str, deadline: Deadline) -> Any:
    try:
        if pipe.poll(max(0.0, deadline.remaining())):
            return pipe.recv()
    except (EOFError, OSError) as error:
        raise PeerLostError(f"{who} has closed the pipe") from error
    raise TransferTimeoutError(f"deadline passed while waiting for {who}")
