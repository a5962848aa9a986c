"""Broadcasts of bytes within a group, with waits that can be ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rl_ckpt_hccl.process_group import make_group
from rl_core.errors import ComponentError
from rl_core.transfer.transport import TransportError
from rl_core.transfer.watch import POLL_S

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store, Work

    from rl_ckpt_hccl.process_group import Library, Member
    from rl_core.transfer.watch import Watch

DEVICE_POLL_S = 2e-4
"""Seconds between two looks at whether a device has finished."""


@dataclass
class Transmission:
    """A broadcast under way, and what to call it in messages.

    Attributes:
        work: torch's handle, which keeps the group's sockets open; None once the group was left.
        what: for messages.
    """

    work: Work | None
    what: str


class Communicator:
    """Broadcasts from rank 0 of one group; every member calls the same, in the same order."""

    def __init__(self, member: Member, rank: int) -> None:
        self._member = member
        self._rank = rank
        self._under_way: list[Transmission] = []

    @classmethod
    def connect(
        cls, library: Library, store: Store, place: tuple[int, int], watch: Watch
    ) -> Communicator:
        """Build the group. Collective.

        Args:
            library: what to build it with.
            store: where these members, and nobody else, find each other.
            place: rank and number of ranks.
            watch: its deadline is for all to connect.
        """
        rank, size = place
        try:
            member = make_group(library, store, place, watch.deadline.remaining())
        except ComponentError:
            raise
        except RuntimeError as error:
            watch.check(f"{size} ranks to build a {library.backend} group")
            msg = f"a {library.backend} group of {size} ranks did not form: {error}"
            raise TransportError(msg) from error
        return cls(member, rank)

    def broadcast(self, data: torch.Tensor, what: str, watch: Watch) -> Transmission:
        """Begin to move flat uint8 `data` from rank 0 into everybody else's."""
        try:
            work = self._member.broadcast(data, watch.deadline.remaining())
        except RuntimeError as error:
            raise TransportError(f"{what} could not be started: {error}") from error
        transmission = Transmission(work, what)
        self._under_way = [each for each in self._under_way if not _ended(each)]
        self._under_way.append(transmission)
        return transmission

    def wait(self, transmission: Transmission, watch: Watch) -> None:
        """Until the bytes are there (receivers), or have been read (sender).

        On a device: until the device has finished, not only until it was told to begin.
        """
        what = transmission.what
        while not self._finished(transmission.work):
            watch.check(what)
        try:
            if transmission.work is not None:
                transmission.work.wait()
        except RuntimeError as error:
            watch.check(what)
            raise TransportError(f"{what} failed at rank {self._rank}: {error}") from error

    def leave(self) -> bool:
        """End the group, with what is under way. Idempotent.

        Nothing here refers to the group afterwards: tracebacks of the failure do refer to here.

        Returns: whether nothing was under way. What was may still use its memory for a while.
        """
        ended = all(_ended(each) for each in self._under_way)
        self._member.leave()
        for transmission in self._under_way:
            transmission.work = None
        self._under_way = []
        return ended

    def _finished(self, work: Work | None) -> bool:
        """Whether the work has ended, well or not, after a short sleep if it has not."""
        if work is None:
            raise TransportError("the group was left")
        if work.is_completed():
            return True
        if self._member.backend != "gloo":
            # NCCL takes a timeout given to `wait` as an order to abort its communicator.
            time.sleep(DEVICE_POLL_S)
            return False
        try:
            work.wait(timedelta(seconds=POLL_S))
        except RuntimeError:
            return bool(work.is_completed())
        return True


def _ended(transmission: Transmission) -> bool:
    return transmission.work is None or bool(transmission.work.is_completed())
