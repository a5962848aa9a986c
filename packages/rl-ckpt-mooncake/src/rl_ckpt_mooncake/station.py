"""What one rank has for its neighbours: an engine that listens, and the memory they may touch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rl_ckpt_mooncake.chain import Neighbour
from rl_ckpt_mooncake.magic import RECORD_BYTES, MagicBuffer
from rl_ckpt_mooncake.transfer import Run
from rl_core.errors import LifecycleError, TransferError
from rl_core.transfer.buffers import BucketBuffers
from rl_core.transfer.transport import BUFFERS

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rl_ckpt_mooncake.magic import Signet
    from rl_ckpt_mooncake.pieces import PiecePlan
    from rl_ckpt_mooncake.transfer import Transfer
    from rl_core.transfer.plan import TransferPlan

logger = logging.getLogger(__name__)


class Station:
    """Memory is registered from `open` to `close`, that is, during one version only.

    Attributes:
        transfer: the engine.
    """

    def __init__(self, transfer: Transfer, device: str) -> None:
        self.transfer = transfer
        self._buffers = BucketBuffers(device)
        self._magic: MagicBuffer | None = None
        self._registered: dict[int, str] = {}
        self._count = 0

    def open(self, plan: TransferPlan, pieces: PiecePlan, signet: Signet, rank: int) -> None:
        """Have buffers for `plan` and a fresh magic buffer, and register them."""
        self._buffers.fit(plan)
        self._magic = MagicBuffer(signet, rank, pieces.most_parts)
        self._register(self._magic.address, self._magic.nbytes, "the magic buffer")
        self._count = min(BUFFERS, len(plan.buckets))
        for number in range(self._count):
            buffer = self._buffers.of(number)
            self._register(buffer.data_ptr(), buffer.numel(), f"bucket buffer {number}")

    def close(self) -> None:
        """Unregister everything, after all neighbours are done; TransportError if that fails."""
        registered, self._registered = self._registered, {}
        for address, what in registered.items():
            self.transfer.unregister(address, what)

    def withdraw(self) -> None:
        """Unregister what can be, whatever state the neighbours are in; never raises."""
        try:
            self.close()
        except TransferError as error:
            logger.warning("memory stays open to peers until the engine is closed: %s", error)

    def destroy(self) -> None:
        """Stop the engine, then give the memory back: nobody touches it any more."""
        self.transfer.close()
        self._buffers.drop()
        self._magic = None

    def neighbour(self) -> Neighbour:
        """Where all this is, for the others."""
        buffers = [self._buffers.of(number).data_ptr() for number in range(self._count)]
        return Neighbour(self.transfer.session, self.magic.address, tuple(buffers))

    @property
    def magic(self) -> MagicBuffer:
        """The magic buffer of the version under way."""
        if self._magic is None:
            raise LifecycleError("no version is under way")
        return self._magic

    def buffer(self, bucket: int) -> torch.Tensor:
        """The buffer in which bucket number `bucket` lives, flat uint8."""
        return self._buffers.of(bucket)

    def tell(
        self, neighbour: Neighbour, place: int, sequence: int, check: Callable[[], None]
    ) -> None:
        """Write our counter into FILLED or TAKEN of a neighbour."""
        run = Run(neighbour.magic + place, self.magic.stage(place, sequence), RECORD_BYTES)
        self.transfer.write(neighbour.session, run, f"counter {sequence}", check)

    def _register(self, address: int, nbytes: int, what: str) -> None:
        self.transfer.register(address, nbytes, what)
        self._registered[address] = what
