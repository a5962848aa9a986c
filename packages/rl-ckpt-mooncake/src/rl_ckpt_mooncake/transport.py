"""Bucket transport by peer-to-peer reads along a chain of ranks."""

from __future__ import annotations

import gc
import logging
import secrets
import threading
from typing import TYPE_CHECKING

from rl_ckpt_mooncake.inlet import ChainInlet
from rl_ckpt_mooncake.magic import Signet
from rl_ckpt_mooncake.outlet import ChainOutlet
from rl_ckpt_mooncake.parts import kind_for
from rl_ckpt_mooncake.pieces import PiecePlan
from rl_ckpt_mooncake.station import Station
from rl_ckpt_mooncake.terms import VersionTerms
from rl_ckpt_mooncake.transfer import Listening, Transfer
from rl_core.logs import kv
from rl_core.transfer.transport import BUFFERS, Inlet, Outlet, Transport, TransportError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.interfaces import Place
    from rl_core.transfer.plan import TransferPlan
    from rl_core.transfer.watch import Watch

logger = logging.getLogger(__name__)

_SLACK_S = 5.0
"""Seconds beyond `stall_timeout_s` that a thread inside Mooncake may take to end."""


class ChainTransport(Transport):
    """The engine and its buffers outlive a group, unless that breaks with bytes under way."""

    def __init__(self, listening: Listening, key: bytes, piece_bytes: int) -> None:
        """Starts nothing; `key` is the run's."""
        self._listening = listening
        self._key = key
        self._piece_bytes = piece_bytes
        self._epoch = 0
        self._group = ""
        self._rank = 0
        self._station: Station | None = None
        self._line: ChainOutlet | ChainInlet | None = None
        self._reapers: list[threading.Thread] = []

    def direct_bytes(self, bucket_bytes: int) -> int:
        """Everything in a segment of its own: parts are announced as they are copied."""
        del bucket_bytes
        return 1

    def offer(self, place: Place, watch: Watch) -> dict[str, str]:
        """A name that no other group has."""
        del watch
        # Counters tell when a buffer is free; this only bounds what the chain can hold.
        self.window = BUFFERS * place.world_size
        return {"group": secrets.token_hex(8), "protocol": self._listening.protocol}

    def join(self, place: Place, properties: Mapping[str, str], watch: Watch) -> None:
        """Start the engine, where it does not run yet."""
        del watch
        theirs, mine = properties.get("protocol"), self._listening.protocol
        if theirs != mine:
            raise TransportError(f"the sender uses {theirs}, this receiver {mine}")
        self._group, self._rank = properties.get("group", ""), place.rank
        if self._station is None:
            self._station = Station(Transfer(self._listening), self._listening.device)
        logger.debug(
            "joined a chain: %s",
            kv(protocol=mine, rank=place.rank, session=self._station.transfer.session),
        )

    def leave(self) -> None:
        """Break off what is under way; peers then see their reads fail."""
        line, self._line = self._line, None
        if line is None or line.closed or self._station is None:
            return
        station, self._station = self._station, None
        station.withdraw()
        for worker in line.workers:
            worker.stop()
        # Peers, and our own threads, may be inside the memory until the engine is closed, and that
        # waits for the threads.
        reaper = threading.Thread(target=_reap, args=(line, station), name="mooncake reaper")
        reaper.daemon = True
        reaper.start()
        self._reapers = [*(each for each in self._reapers if each.is_alive()), reaper]

    def outlet(self, plan: TransferPlan, watch: Watch) -> Outlet:
        """Sender: open the buckets to the first receiver."""
        self._epoch += 1
        kind = kind_for(self._listening.device)
        terms = VersionTerms(self._epoch, self._piece_bytes, kind)
        station, pieces = self._running(), PiecePlan.of(plan, terms.piece_bytes)
        line = ChainOutlet(station, pieces, terms, self._listening.device, watch)
        self._line = line
        station.open(plan, pieces, Signet(self._key, self._group, terms.epoch), self._rank)
        return line

    def inlet(self, plan: TransferPlan, properties: Mapping[str, str], watch: Watch) -> Inlet:
        """Receiver: open the buckets to the next receiver."""
        terms = VersionTerms.parse(properties)
        station, pieces = self._running(), PiecePlan.of(plan, terms.piece_bytes)
        line = ChainInlet(station, pieces, terms, watch)
        self._line = line
        station.open(plan, pieces, Signet(self._key, self._group, terms.epoch), self._rank)
        return line

    def close(self) -> None:
        """Stop the engine and give back all memory."""
        self.leave()
        for reaper in self._reapers:
            reaper.join(self._listening.stall_timeout_s + _SLACK_S)
            if reaper.is_alive():
                logger.warning("Mooncake does not return from a transfer; its memory is kept")
        self._reapers = []
        station, self._station = self._station, None
        if station is not None:
            station.destroy()

    def _running(self) -> Station:
        if self._station is None:
            raise TransportError("the chain was broken off")
        return self._station


def _reap(line: ChainOutlet | ChainInlet, station: Station) -> None:
    for worker in line.workers:
        while not worker.join(_SLACK_S):
            pass
    station.destroy()
    # An exception and the frames that it passed refer to each other; some refer to the engine.
    gc.collect()
