"""Calls on many Ray actors at once, waited for together."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from minirl.ray_launcher import translated
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
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(end - time.monotonic(), 0.0))
        if not done:
            late = ", ".join(owner[reference] for reference in waiting)
            raise TransferTimeoutError(f"{what}: no answer within {timeout_s:.0f} s from {late}")
        for reference in done:
            _raise_failure(reference, owner[reference])
    return ray.get([call.reference for call in calls])  # type: ignore[no-any-return]


def _raise_failure(reference: Any, who: str) -> None:
    try:
        ray.get(reference)
    except (RayTaskError, RayActorError) as error:
        raise translated(error, who) from error
