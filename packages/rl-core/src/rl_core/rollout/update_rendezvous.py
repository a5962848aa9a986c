"""Brings the tensor-parallel ranks of a replica together for one weight update.

Each rank's adapter offers its stream separately; the engine is updated once, when all offers of
the same version are there. Runs in the server's event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rl_core.errors import (
    LifecycleError,
    MiniRLError,
    StaleVersionError,
    TransferTimeoutError,
)
from rl_core.interfaces import LoadReport
from rl_core.rollout.protocol import Offer

Run = Callable[[Sequence[Offer]], Awaitable[list[LoadReport]]]


class Rendezvous:
    """One update: collects the offers of all ranks, runs it once, hands out the reports."""

    def __init__(self, first: Offer, ranks: int, run: Run) -> None:
        self._first = first
        self._ranks = ranks
        self._run = run
        self._offers: dict[int, Offer] = {}
        self._result: asyncio.Future[list[LoadReport]] = asyncio.get_running_loop().create_future()

    @property
    def version(self) -> object:
        """The version that is being loaded."""
        return self._first.manifest.version

    async def join(self, offer: Offer) -> LoadReport:
        """Add one rank's offer and wait for the outcome.

        Errors: what the update raised, the same for every rank; TransferTimeoutError naming the
        ranks that did not come.
        """
        self.check(offer)
        self._offers[offer.tp_rank] = offer
        if len(self._offers) == self._ranks:
            await self._finish()
        reports = await self._outcome(offer.seconds)
        return reports[offer.tp_rank]

    def check(self, offer: Offer) -> None:
        """Refuse an offer that does not belong to this update."""
        if not 0 <= offer.tp_rank < self._ranks:
            msg = f"tp_rank={offer.tp_rank} is not a rank of this replica (TP {self._ranks})"
            raise LifecycleError(msg)
        if offer.manifest.version != self._first.manifest.version:
            msg = f"version {offer.manifest.version} is refused: {self.version} is being loaded"
            raise StaleVersionError(msg)
        if offer.tp_rank in self._offers:
            msg = f"rank {offer.tp_rank} already sends version {self.version}"
            raise StaleVersionError(msg)

    def fail(self, error: MiniRLError) -> None:
        """End the update for every rank that waits."""
        if not self._result.done():
            self._result.set_exception(error)
            self._result.exception()  # waiting for it is optional

    async def _finish(self) -> None:
        offers = [self._offers[rank] for rank in range(self._ranks)]
        try:
            for offer in offers:
                self._first.manifest.check_same_structure(offer.manifest)
            reports = await self._run(offers)
        except MiniRLError as error:
            self.fail(error)
        else:
            if not self._result.done():  # the deadline may have passed meanwhile
                self._result.set_result(reports)

    async def _outcome(self, seconds: float) -> list[LoadReport]:
        try:
            return await asyncio.wait_for(asyncio.shield(self._result), seconds)
        except TimeoutError:
            missing = sorted(set(range(self._ranks)) - set(self._offers))
            who = f"ranks {missing} did not offer it" if missing else "the engine did not finish"
            msg = f"deadline passed while loading {self.version}: {who}"
            error = TransferTimeoutError(msg)
            self.fail(error)
            raise error from None
