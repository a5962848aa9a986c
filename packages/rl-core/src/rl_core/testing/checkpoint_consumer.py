"""The consumer of a receiver's leases: it checks and records, as an adapter would load."""

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from rl_core import digests
from rl_core.errors import MiniRLError
from rl_core.interfaces import BucketLease, LeasedTensor
from rl_core.testing.checkpoint_orders import Mishap, Received, ReceiveOrder
from rl_core.torch import content_digest


class StreamError(MiniRLError):
    """Stands for any error of the trainer's stream or of the engine that loads."""


class Consumer:
    """Consumes one version of the weights and writes down what came."""

    def __init__(self, order: ReceiveOrder, befall: Callable[[Mishap], None]) -> None:
        self.received = Received()
        self._order = order
        self._befall = befall

    def consume(self, leases: Iterator[BucketLease]) -> None:
        """Take every lease in turn, or as the order wants it."""
        if self._order.keep_open:
            self._keep_open(leases)
        for lease in leases:
            self._one(lease)
            if self._order.leave_at == self.received.leases - 1:
                return

    def _one(self, lease: BucketLease) -> None:
        number = self.received.leases
        self.received.leases += 1
        with lease as entries:
            before = self._record(entries)
            if self._order.mishap is not None and self._order.mishap.at == number:
                self._befall(self._order.mishap)
            if self._order.hold_s:
                time.sleep(self._order.hold_s)
                self._compare(entries, before)
        self.received.last_exit_at = time.monotonic()

    def _record(self, entries: Sequence[LeasedTensor]) -> dict[str, str]:
        found = {}
        for entry in entries:
            name = entry.meta.name
            if name == self._order.flip:
                _flip(entry.tensor)
            kind = digests.kind_of(entry.digest) if entry.digest else digests.XXH3_128
            found[name] = content_digest(entry.meta, entry.tensor, kind)
            self.received.metas.append(entry.meta)
            self.received.carried[name] = entry.digest
            if entry.digest is not None:
                digests.check(name, entry.digest, found[name])
        self.received.digests.update(found)
        return found

    def _compare(self, entries: Sequence[LeasedTensor], before: dict[str, str]) -> None:
        for entry in entries:
            expected = before[entry.meta.name]
            kind = digests.kind_of(expected)
            if content_digest(entry.meta, entry.tensor, kind) != expected:
                self.received.touched.append(entry.meta.name)

    def _keep_open(self, leases: Iterator[BucketLease]) -> None:
        """Ask for a second lease inside the first: its buffer must not be given away."""
        first = next(leases)
        self.received.leases += 1
        with first as entries:
            before = self._record(entries)
            try:
                second = next(leases)
            finally:
                self._compare(entries, before)
            self._one(second)
            self._compare(entries, before)


def _flip(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the last byte."""
    tensor.view(-1)[-1:].view(torch.uint8)[-1] ^= 1
