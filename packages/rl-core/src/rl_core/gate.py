"""The gate in front of a rollout server: it answers only what the publish state allows."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rl_core.deadlines import Deadline
from rl_core.errors import ReplicaFencedError, TransferTimeoutError
from rl_core.publish import Action, Event, Phase, ReplicaState, advance


class ServingGate:
    """Holds one replica's publish state and counts its requests in flight. Thread-safe.

    A rollout server wraps every request in `admit()`, passes events to `apply()`, and carries out
    the returned actions other than opening and closing, which the gate does itself.

    A closed gate ends no request. Whoever applies Begin has to abort, drain or pause what is in
    flight before the first byte is loaded, requests included that were admitted but not handed to
    the engine yet; `wait_idle` tells when there are none.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = ReplicaState()
        self._in_flight = 0
        self._changed = threading.Condition()

    @property
    def state(self) -> ReplicaState:
        """The present state."""
        with self._changed:
            return self._state

    @property
    def in_flight(self) -> int:
        """Requests admitted and not yet finished."""
        with self._changed:
            return self._in_flight

    def apply(self, event: Event) -> tuple[Action, ...]:
        """Advance the state; errors as in `publish.advance`. The actions, for the caller."""
        with self._changed:
            self._state, actions = advance(self._state, event)
            self._changed.notify_all()
            return actions

    @contextmanager
    def admit(self) -> Iterator[ReplicaState]:
        """Count one request for the length of the block; ReplicaFencedError if none is allowed."""
        with self._changed:
            self._check_open()
            self._in_flight += 1
            state = self._state
        try:
            yield state
        finally:
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

    def wait_idle(self, deadline: Deadline) -> None:
        """Block until no request is in flight; TransferTimeoutError at the deadline."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._in_flight == 0, deadline.remaining()):
                msg = f"{self._name}: {self._in_flight} requests still in flight"
                raise TransferTimeoutError(msg)

    def refusal(self) -> str | None:
        """Why requests are refused at present; None while they are answered."""
        with self._changed:
            return self._refusal()

    def _check_open(self) -> None:
        refusal = self._refusal()
        if refusal is not None:
            raise ReplicaFencedError(refusal)

    def _refusal(self) -> str | None:
        state = self._state
        if state.serving:
            return None
        if state.phase is Phase.FENCED:
            return f"{self._name} is fenced: {state.reason}"
        if state.committed is None:
            return f"{self._name} has no weights yet ({state.phase}); sync it first"
        return f"{self._name} is between versions ({state.phase})"
