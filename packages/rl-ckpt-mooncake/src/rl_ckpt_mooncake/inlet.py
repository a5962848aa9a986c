"""A receiver's end of the chain: reads ahead, verifies, hands on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_ckpt_mooncake.chain import PREDECESSOR, SUCCESSOR, Herald, Neighbour, Relay
from rl_ckpt_mooncake.parts import digest_part
from rl_core.errors import DigestMismatchError, MessageError
from rl_core.transfer.transport import Inlet, TransportError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_ckpt_mooncake.pieces import Piece, PiecePlan
    from rl_ckpt_mooncake.station import Station
    from rl_ckpt_mooncake.terms import VersionTerms
    from rl_ckpt_mooncake.worker import Worker
    from rl_core.transfer.watch import Watch


class ChainInlet(Inlet):
    """Two buckets: one is with the consumer while a thread reads the other one.

    Attributes:
        workers: threads that this version has started.
        closed: whether all ranks are done, so that nobody is in this rank's memory any more.
    """

    def __init__(
        self, station: Station, pieces: PiecePlan, terms: VersionTerms, watch: Watch
    ) -> None:
        """`station` is open."""
        self.workers: list[Worker] = []
        self.closed = False
        self._station = station
        self._pieces = pieces
        self._terms = terms
        self._watch = watch
        self._relay: Relay | None = None

    def properties(self) -> dict[str, str]:
        """Where this rank's memory is."""
        return {"station": self._station.neighbour().text()}

    def introduced(self, properties: Mapping[str, str]) -> None:
        """Begin to read from the predecessor."""
        predecessor = Neighbour.parse(properties.get(PREDECESSOR, ""))
        relay = Relay(self._station, self._pieces, predecessor, self._watch.deadline)
        if SUCCESSOR in properties:
            successor = Neighbour.parse(properties[SUCCESSOR])
            last = self._pieces.last
            herald = Herald(self._station, successor, last, self._watch.deadline)
            relay.hand_on(herald)
            self.workers.append(herald)
        self._relay = relay
        self.workers.append(relay)
        for worker in self.workers:
            worker.start()

    def start(self, bucket: int) -> None:
        """The buffer is no longer read by the consumer."""
        if self._station.buffer(bucket).device.type != "cpu":
            torch.accelerator.synchronize()  # peers' writes do not wait for our streams
        self._reader().grant(bucket)

    def finish(self, bucket: int) -> torch.Tensor:
        """Wait for every piece, and verify the parts that end in it.

        Errors: DigestMismatchError naming the first tensor that is not what the sender packed.
        """
        relay, buffer = self._reader(), self._station.buffer(bucket)
        for piece in self._pieces.pieces[bucket]:
            sequence = piece.sequence
            what = self._pieces.describe(bucket, piece)
            relay.wait_for(lambda sequence=sequence: relay.read >= sequence, self._watch, what)  # type: ignore[misc]
            self._verify(bucket, piece, buffer)
        return buffer

    def close(self) -> None:
        """All receivers are done: close the memory."""
        for worker in self.workers:
            worker.fail_with_it()
            if not worker.join(self._watch.deadline.remaining()):
                raise TransportError("the successor in the chain does not take the last counter")
        self._station.close()
        self.closed = True

    def _reader(self) -> Relay:
        if self._relay is None:
            raise MessageError("this receiver was not told from whom to read")
        return self._relay

    def _verify(self, bucket: int, piece: Piece, buffer: torch.Tensor) -> None:
        for number in piece.parts:
            part = self._pieces.parts[bucket][number]
            data = buffer[part.slot.offset : part.slot.offset + part.slot.nbytes]
            digest = digest_part(data, self._terms.digest_kind)
            if not self._station.magic.vouches(bucket, number, digest):
                end = part.slot.start + part.slot.nbytes
                msg = (
                    f"tensor {part.meta.name!r}: bytes {part.slot.start} to {end} are not those "
                    "that the sender packed; somebody wrote into a bucket, or memory is faulty"
                )
                raise DigestMismatchError(msg, [part.meta.name])
