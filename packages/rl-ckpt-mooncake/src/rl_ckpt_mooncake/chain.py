"""Who reads from whom: each receiver from the rank before it, the first one from the sender.

```
sender ──pieces──► rank 1 ──pieces──► rank 2 ──► ...      read by the rank on the right
   ──FILLED──►       ──FILLED──►                          written by the rank on the left
   ◄──TAKEN──        ◄──TAKEN──                           written by the rank on the right
```

A rank hands a piece on as soon as it has it, so while rank k reads piece i + 1, rank k + 1 reads
piece i. A bucket's buffer is filled again once the consumer has left the bucket that was in it and
the successor has taken it. Two buffers a rank, so rank k is at most two buckets ahead of k + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_ckpt_mooncake.magic import FILLED, SEAL_BYTES, TAKEN, seals_at
from rl_ckpt_mooncake.transfer import Run
from rl_ckpt_mooncake.waiting import wait_until
from rl_ckpt_mooncake.worker import Worker
from rl_core.errors import MessageError
from rl_core.transfer.transport import BUFFERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_ckpt_mooncake.pieces import Piece, PiecePlan
    from rl_ckpt_mooncake.station import Station
    from rl_core.deadlines import Deadline

PREDECESSOR = "predecessor"
SUCCESSOR = "successor"


@dataclass(frozen=True)
class Neighbour:
    """Where another rank's memory is.

    Attributes:
        session: by which Mooncake reaches it.
        magic: address of its magic buffer.
        buffers: addresses of its bucket buffers.
    """

    session: str
    magic: int
    buffers: tuple[int, ...]

    def text(self) -> str:
        """As it travels."""
        return " ".join([self.session, *map(str, (self.magic, *self.buffers))])

    @classmethod
    def parse(cls, text: str) -> Neighbour:
        """What `text` made; MessageError if it did not."""
        session, *numbers = text.split(" ")
        host, _, port = session.rpartition(":")
        if not host or not port.isascii() or not port.isdecimal():
            raise MessageError(f"not a session of Mooncake: {session!r}")
        if not all(number.isascii() and number.isdecimal() for number in numbers):
            raise MessageError(f"not addresses of memory: {numbers!r}")
        addresses = [int(number) for number in numbers]
        if not 1 <= len(addresses) <= 1 + BUFFERS or not all(0 < a < 1 << 64 for a in addresses):
            raise MessageError(f"not a magic buffer and buckets: {numbers!r}")
        return cls(session, addresses[0], tuple(addresses[1:]))

    def buffer(self, bucket: int) -> int:
        """Address of the buffer in which bucket number `bucket` lives."""
        try:
            return self.buffers[bucket % BUFFERS]
        except IndexError:
            raise MessageError(f"{self.session} has no buffer for bucket {bucket}") from None


def introductions(members: Mapping[int, str]) -> dict[int, dict[str, str]]:
    """What each receiver is told of its neighbours, by rank.

    Args:
        members: `Neighbour.text` of all ranks, by rank in the group.
    """
    told: dict[int, dict[str, str]] = {}
    for rank in sorted(members)[1:]:
        told[rank] = {PREDECESSOR: members[rank - 1]}
        if rank + 1 in members:
            told[rank][SUCCESSOR] = members[rank + 1]
    return told


class Herald(Worker):
    """Tells the successor how far this rank's buffers are filled; the latest news only."""

    def __init__(
        self, station: Station, successor: Neighbour, last: int, deadline: Deadline
    ) -> None:
        """`last` is the sequence with which the version ends."""
        waiting_for = f"the next receiver, at {successor.session}, to take what is announced"
        super().__init__("mooncake herald", deadline, waiting_for)
        self._station = station
        self._successor = successor
        self._last = last
        self._filled = 0
        self._told = 0

    def announce(self, sequence: int) -> None:
        """All pieces up to `sequence` can be read. From any thread; does not wait."""

        def advance() -> None:
            self._filled = sequence

        self.change(advance)

    def work(self) -> None:
        """Write FILLED until all was announced."""
        while self._told < self._last:
            self.await_change(lambda: self._filled > self._told)
            sequence = self._filled
            self._station.tell(self._successor, FILLED, sequence, self.go_on)
            self._told = sequence


class Relay(Worker):
    """Reads a version from the predecessor, and has it announced to the successor."""

    def __init__(
        self, station: Station, pieces: PiecePlan, predecessor: Neighbour, deadline: Deadline
    ) -> None:
        """Reads nothing before `grant`."""
        super().__init__("mooncake relay", deadline, "this receiver's consumer to begin")
        self._station = station
        self._pieces = pieces
        self._predecessor = predecessor
        self._herald: Herald | None = None
        self._granted = -1
        self.read = 0
        """Sequence up to which the pieces are here."""

    def hand_on(self, herald: Herald) -> None:
        """There is a successor: announce to it, and wait for it before a buffer is filled again."""
        self._herald = herald

    def grant(self, bucket: int) -> None:
        """The consumer reads none of the buffers up to that of `bucket` any more."""

        def advance() -> None:
            self._granted = bucket

        self.change(advance)

    def work(self) -> None:
        """Read all buckets."""
        for bucket, pieces in enumerate(self._pieces.pieces):
            self.waiting_for = f"this receiver's consumer to leave the buffer of bucket {bucket}"
            self.await_change(lambda bucket=bucket: self._granted >= bucket)  # type: ignore[misc]
            self._await_successor(bucket)
            for piece in pieces:
                self._take(bucket, piece)

    def _await_successor(self, bucket: int) -> None:
        if self._herald is not None and bucket >= BUFFERS:
            due = self._pieces.through[bucket - BUFFERS]
            magic = self._station.magic
            self.waiting_for = f"the next receiver to read bucket {bucket - BUFFERS}"
            wait_until(lambda: magic.count(TAKEN) >= due, self.go_on)

    def _take(self, bucket: int, piece: Piece) -> None:
        magic = self._station.magic
        self.waiting_for = self._pieces.describe(bucket, piece)
        wait_until(lambda: magic.count(FILLED) >= piece.sequence, self.go_on)
        self._read(bucket, piece)
        count = len(self._pieces.through)
        if piece.sequence == self._pieces.through[bucket] and bucket + BUFFERS < count:
            self._station.tell(self._predecessor, TAKEN, piece.sequence, self.go_on)
        if self._herald is not None:
            self._herald.announce(piece.sequence)

        def advance() -> None:
            self.read = piece.sequence

        self.change(advance)

    def _read(self, bucket: int, piece: Piece) -> None:
        there, most_parts = self._predecessor, self._pieces.most_parts
        seals = seals_at(bucket, most_parts) + SEAL_BYTES * piece.parts.start
        here = self._station.buffer(bucket).data_ptr()
        runs = [
            Run(there.buffer(bucket) + piece.offset, here + piece.offset, piece.nbytes),
            Run(
                there.magic + seals,
                self._station.magic.address + seals,
                SEAL_BYTES * len(piece.parts),
            ),
        ]
        self._station.transfer.read(there.session, runs, f"piece {piece.sequence}", self.go_on)
