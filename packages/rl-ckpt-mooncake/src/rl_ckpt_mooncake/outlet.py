"""The sender's end of the chain: fills buckets piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ckpt_mooncake.chain import Herald, Neighbour, introductions
from rl_ckpt_mooncake.magic import TAKEN
from rl_ckpt_mooncake.parts import copy_part
from rl_ckpt_mooncake.waiting import wait_until
from rl_core.transfer.transport import BUFFERS, Outlet, TransportError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rl_ckpt_mooncake.pieces import PiecePlan
    from rl_ckpt_mooncake.station import Station
    from rl_ckpt_mooncake.terms import VersionTerms
    from rl_ckpt_mooncake.worker import Worker
    from rl_core.transfer.plan import Part, Segment
    from rl_core.transfer.watch import Watch


class ChainOutlet(Outlet):
    """Copies every part into a bucket, seals it, and announces the pieces that are complete.

    Attributes:
        workers: threads that this version has started.
        closed: whether all ranks are done, so that nobody is in this rank's memory any more.
    """

    def __init__(
        self, station: Station, pieces: PiecePlan, terms: VersionTerms, device: str, watch: Watch
    ) -> None:
        """`station` is open."""
        self.device = device
        self.workers: list[Worker] = []
        self.closed = False
        self._station = station
        self._pieces = pieces
        self._terms = terms
        self._watch = watch
        self._herald: Herald | None = None
        self._number = 0
        self._announced = 0

    def properties(self) -> dict[str, str]:
        """The terms of this version."""
        return self._terms.properties()

    def introduce(self, receivers: Mapping[int, Mapping[str, str]]) -> dict[int, dict[str, str]]:
        """Tell each receiver its neighbours, and begin to talk to the first."""
        members = {rank: said.get("station", "") for rank, said in receivers.items()}
        first = Neighbour.parse(members[1])
        self._herald = Herald(self._station, first, self._pieces.last, self._watch.deadline)
        self.workers.append(self._herald)
        self._herald.start()
        return introductions({0: self._station.neighbour().text(), **members})

    def open_bucket(self, bucket: int) -> None:
        """Wait until the successor has taken the bucket that was in this one's buffer."""
        if bucket >= BUFFERS:
            due, magic = self._pieces.through[bucket - BUFFERS], self._station.magic
            wait_until(lambda: magic.count(TAKEN) >= due, lambda: self._check(bucket))
        self._number = 0

    def buffer(self, bucket: int) -> torch.Tensor:
        """The buffer of a bucket that was opened."""
        return self._station.buffer(bucket)

    def start(self, segment: Segment, data: torch.Tensor) -> None:
        """Copy; the bytes have been read when it returns."""
        buffer = self.buffer(segment.bucket)
        for part in segment.parts:
            if part.slot.nbytes:
                start = part.slot.offset - segment.offset
                self._place(part, buffer, data[start : start + part.slot.nbytes])

    def settle(self) -> None:
        """Nothing is sent from a tensor's own storage: it would have to be open to all peers."""

    def finish(self) -> None:
        """All receivers are done: close the memory."""
        for worker in self.workers:
            worker.fail_with_it()
            if not worker.join(self._watch.deadline.remaining()):
                raise TransportError("the first receiver does not take the last counter")
        self._station.close()
        self.closed = True

    def _check(self, bucket: int) -> None:
        if self._herald is not None:
            self._herald.fail_with_it()
        self._watch.check(f"the first receiver to read bucket {bucket - BUFFERS}")

    def _place(self, part: Part, buffer: torch.Tensor, data: torch.Tensor) -> None:
        begin, bucket = part.slot.offset, part.slot.bucket
        target = buffer[begin : begin + part.slot.nbytes]
        digest = copy_part(
            target, data, self._terms.digest_kind, lambda done: self._announce(bucket, begin + done)
        )
        self._station.magic.set_seal(bucket, self._number, digest)
        self._number += 1
        self._announce(bucket, begin + part.slot.nbytes)

    def _announce(self, bucket: int, filled: int) -> None:
        """The bucket is filled up to byte `filled`."""
        complete = self._pieces.complete(bucket, filled)
        if complete > self._announced and self._herald is not None:
            self._announced = complete
            self._herald.announce(complete)
