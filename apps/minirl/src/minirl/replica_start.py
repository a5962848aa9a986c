"""The start of a replica in a thread of its own, so that a run need not wait for it."""

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from rl_core.deadlines import Deadline
from rl_core.errors import LifecycleError
from rl_core.interfaces import Replica

GRACE_S = 10.0
"""Seconds after its deadline in which a start may still say what was wrong."""
_POLL_S = 1.0


class ReplicaStart:
    """One replica on its way up. Runs in the controller's process.

    Nothing waits for the thread: what ends a start that is no longer wanted is the replica's
    `shutdown`.

    Args:
        rank: number of the replica, for messages.
        replica: created, not started.
        deadline: by when its server has to answer.
    """

    def __init__(self, rank: int, replica: Replica, deadline: Deadline) -> None:
        self._rank = rank
        self._overdue = Deadline(deadline.at + GRACE_S)
        self.outcome: Future[None] = Future()
        threading.Thread(
            target=self._run, args=(replica, deadline), name=f"start-replica-{rank}", daemon=True
        ).start()

    def up(self) -> bool:
        """Whether the server answers. Errors: its own if it failed, LifecycleError if overdue."""
        if self.outcome.done():
            self.outcome.result()
            return True
        if self._overdue.expired:
            raise LifecycleError(f"replica {self._rank}: its start has not ended by its deadline")
        return False

    def _run(self, replica: Replica, deadline: Deadline) -> None:
        try:
            replica.start(deadline)
        except BaseException as error:  # noqa: BLE001  (raised where somebody asks)
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(None)


def wait_for(starts: Sequence[ReplicaStart], at_least: int) -> None:
    """Block until so many or all are up; the first error of any, as `ReplicaStart.up` raises it."""
    at_least = min(at_least, len(starts))
    while sum([start.up() for start in starts]) < at_least:
        pending = [start.outcome for start in starts if not start.outcome.done()]
        wait(pending, _POLL_S, FIRST_COMPLETED)
