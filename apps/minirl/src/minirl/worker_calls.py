"""Calls on many Ray actors at once, waited for together."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minirl.ray_launcher import fetch, ready
from rl_core.errors import TransferTimeoutError


@dataclass(frozen=True)
class WorkerCall:
    """A method running in one actor.

    Attributes:
        reference: Ray's object reference of its result.
        who: the actor, for messages.
    """

    reference: Any
    who: str


def wait_all(what: str, calls: Sequence[WorkerCall], timeout_s: float) -> list[Any]:
    """Results in the order of the calls.

    The first failure is raised at once, in our terms: the others may be waiting for the one that
    failed. TransferTimeoutError names who did not answer in time.
    """
    owner = {call.reference: call.who for call in calls}
    end = time.monotonic() + timeout_s
    waiting = list(owner)
    results: dict[Any, Any] = {}
    while waiting:
        done, waiting = ready(waiting, end - time.monotonic())
        for reference in done:
            results[reference] = fetch(reference, owner[reference])
        if not done and time.monotonic() >= end:
            late = ", ".join(owner[reference] for reference in waiting)
            raise TransferTimeoutError(f"{what}: no answer within {timeout_s:.0f} s from {late}")
    return [results[call.reference] for call in calls]
