"""Calls on many Ray actors at once, waited for together."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from minirl.last_words import ProcessLog
from minirl.ray_launcher import ForeignError, MemberDiedError, fetch, ready
from rl_core.errors import MiniRLError, PeerLostError, TransferTimeoutError

SETTLE_S = 3.0
"""Seconds between the first failure and the end of the wait: Ray takes one to notice a death."""


@dataclass(frozen=True)
class WorkerCall:
    """A method running in one actor.

    Attributes:
        reference: Ray's object reference of its result.
        role: of the actor, such as `actor`.
        rank: of the actor within its role.
        log: what the actor's process writes, on its own node.
    """

    reference: Any
    role: str
    rank: int
    log: ProcessLog | None = None

    @property
    def who(self) -> str:
        """The actor, for messages."""
        return f"{self.role} rank {self.rank}"


class Witness(NamedTuple):
    """One actor, and how a call on it failed.

    Attributes:
        role: of the actor.
        rank: within its role.
        error: in our terms; a TransferTimeoutError if it did not answer.
    """

    role: str
    rank: int
    error: Exception


def wait_all(
    what: str,
    calls: Sequence[WorkerCall],
    timeout_s: float,
    witnesses: list[Witness] | None = None,
) -> list[Any]:
    """Results in the order of the calls.

    After a failure the others have `SETTLE_S` to say what they know, since they may be waiting for
    the one that failed; then the most telling error is raised, in our terms.
    TransferTimeoutError names who did not answer in time. `witnesses` gets what each of those that
    failed said, or those that did not answer, if there was nothing else.
    """
    owner = {call.reference: call for call in calls}
    end = time.monotonic() + timeout_s
    waiting = list(owner)
    results: dict[Any, Any] = {}
    failed: list[Witness] = [] if witnesses is None else witnesses
    errors: list[Exception] = []
    while waiting:
        done, waiting = ready(waiting, end - time.monotonic())
        for reference in done:
            call = owner[reference]
            try:
                results[reference] = fetch(reference, call.who, call.log)
            except MiniRLError as error:
                errors.append(error)
                failed.append(Witness(call.role, call.rank, error))
                end = min(end, time.monotonic() + SETTLE_S) if len(errors) == 1 else end
        if not done and time.monotonic() >= end:
            break
    if errors:
        raise root_cause(errors)
    if waiting:
        late = [owner[reference] for reference in waiting]
        names = ", ".join(call.who for call in late)
        silence = TransferTimeoutError(f"{what}: no answer within {timeout_s:.0f} s from {names}")
        failed += [Witness(call.role, call.rank, silence) for call in late]
        raise silence
    return [results[call.reference] for call in calls]


def root_cause(errors: Sequence[Exception]) -> Exception:
    """Of what several processes say of one failure, that which explains the others.

    A death explains everything, an error of ours more than one that nobody translated, and both
    more than a broken connection or a deadline, which are how others notice. Among equals the
    first in time.
    """
    return min(errors, key=_remoteness)


def _remoteness(error: Exception) -> int:
    match error:
        case MemberDiedError():
            return 0
        case PeerLostError() | TransferTimeoutError():
            return 3
        case ForeignError():
            return 2
    return 1
