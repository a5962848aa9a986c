"""The sender's end of the control plane: one connection for each receiver."""

import logging
import select
from collections.abc import Iterable, Mapping
from threading import Thread
from typing import TypeVar

from rl_core.channel import Channel, Listener
from rl_core.errors import (
    LifecycleError,
    MessageError,
    StaleVersionError,
)
from rl_core.interfaces import Place
from rl_core.remote_errors import to_wire
from rl_core.transfer.control import ControlEnd
from rl_core.transfer.door import Door
from rl_core.transfer.messages import PROTOCOL, Ack, Failed, Join, Message, ToReceiver
from rl_core.transfer.watch import Watch

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Peers:
    """Every receiver of a group, spoken to together. Rank 0 of the group owns it."""

    def __init__(self) -> None:
        self._ends: dict[int, ControlEnd] = {}
        self._acked: dict[int, int] = {}

    def accept(
        self, listener: Listener, key: bytes, join: Join, place: Place, watch: Watch
    ) -> None:
        """Wait until every receiver of `place` has joined.

        Whoever does not hold the key is refused and does not disturb the others.

        Args:
            listener: where they connect.
            key: of the run.
            join: what their `Join` must say, apart from the rank.
            place: of the sender.
            watch: ends the wait.
        """
        due = set(range(1, place.world_size))
        with Door(listener, key, lambda message: _check_join(message, join, place)) as door:
            while missing := due - self._ends.keys():
                self.pump(watch)
                watch.check(f"receivers {[_name(place, rank) for rank in sorted(missing)]} to join")
                for channel, said in door.admitted(watch):
                    self._seat(channel, _name(place, said.rank), said.rank)

    def tell(self, message: ToReceiver, watch: Watch) -> None:
        """Send one message to all."""
        self.tell_each(dict.fromkeys(self._ends, message), watch)

    def tell_each(self, messages: Mapping[int, ToReceiver], watch: Watch) -> None:
        """Send each its own message, by rank in the group.

        Errors: what a receiver reports while another one does not read, beside those of sending.
        """
        listening = watch.hearing(lambda: self._read(watch))
        for rank, message in messages.items():
            self._ends[rank].send(message, listening)

    def gather(self, kind: type[T], watch: Watch) -> dict[int, T]:
        """One message of `kind` from each, by rank in the group.

        Errors: what a receiver reported; MessageError if one says something else.
        """
        got: dict[int, T] = {}
        while missing := [rank for rank in self._ends if rank not in got]:
            self._read(watch)
            for rank in missing:
                message = self._ends[rank].take(kind)
                if message is not None:
                    got[rank] = message
            if len(got) < len(self._ends):
                self._wait(watch, kind.__name__, missing)
        return got

    def await_ack(self, bucket: int, watch: Watch) -> None:
        """Wait until all receivers have acknowledged every bucket up to `bucket`."""
        while True:
            self._read(watch)
            late = [rank for rank in self._ends if not self._acknowledged(rank, bucket)]
            if not late:
                return
            self._wait(watch, f"the acknowledgement of bucket {bucket}", late)

    def begin(self) -> None:
        """Forget the acknowledgements of the version before."""
        self._acked = dict.fromkeys(self._ends, -1)

    def pump(self, watch: Watch) -> None:
        """Read what has arrived; raises what a receiver reported, or that one is gone."""
        for end in self._ends.values():
            end.pump(watch.deadline)

    def _read(self, watch: Watch) -> None:
        """As `pump`, but one that is gone is found by who needs a message of it."""
        for end in self._ends.values():
            end.read(watch.deadline)

    def report(self, error: BaseException, where: str) -> None:
        """Tell all that still listen that the sync has failed.

        At once: one that reads nothing does not hold up the news for the others.
        """
        failed = Failed(to_wire(error, where))
        # A copy: aborts come from another thread.
        reports = [Thread(target=end.report, args=(failed,)) for end in list(self._ends.values())]
        for report in reports:
            report.start()
        for report in reports:
            report.join()

    def close(self) -> None:
        """Close every connection. Idempotent."""
        for end in self._ends.values():
            end.close()
        self._ends.clear()

    def _acknowledged(self, rank: int, bucket: int) -> bool:
        while self._acked[rank] < bucket:
            ack = self._ends[rank].take(Ack)
            if ack is None:
                return False
            if ack.bucket != self._acked[rank] + 1:
                due = self._acked[rank] + 1
                msg = f"{self._ends[rank].peer} acknowledged bucket {ack.bucket}, due was {due}"
                raise MessageError(msg).blaming(self._ends[rank].peer)
            self._acked[rank] = ack.bucket
        return True

    def _seat(self, channel: Channel, name: str, rank: int) -> None:
        """One that joins again takes the place of its earlier connection."""
        if rank in self._ends:
            self._ends.pop(rank).close()
        self._ends[rank] = ControlEnd(channel, name)

    def _wait(self, watch: Watch, what: str, ranks: Iterable[int]) -> None:
        names = ", ".join(self._ends[rank].peer for rank in ranks)
        watch.check(f"{what} from {names}")
        poll = select.poll()
        for end in self._ends.values():
            if end.fileno() >= 0:
                poll.register(end.fileno(), select.POLLIN)
        poll.poll(20)


def _name(place: Place, rank: int) -> str:
    return f"receiver {place.endpoints[rank].rank}"


def _check_join(join: Message, expected: Join, place: Place) -> None:
    if not isinstance(join, Join):
        raise MessageError(f"a peer began with {type(join).__name__} instead of Join")
    if join.protocol != PROTOCOL:
        msg = f"receiver speaks protocol {join.protocol}, sender {PROTOCOL}; install equal versions"
        raise MessageError(msg)
    if join.run_id != expected.run_id:
        raise StaleVersionError(
            f"receiver is of run {join.run_id!r}, sender of {expected.run_id!r}"
        )
    if join.group != expected.group:
        raise LifecycleError("receiver was given other members of the group than the sender")
    if not 0 < join.rank < place.world_size:
        raise MessageError(f"rank {join.rank} is not a receiver's of {place.world_size} ranks")
