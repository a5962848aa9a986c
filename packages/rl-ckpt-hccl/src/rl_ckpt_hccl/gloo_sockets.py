"""Ending a gloo group at once, also while it blocks.

Gloo cannot be interrupted: `abort` does nothing, and destroying a group waits for its works, which
wait for a peer or a timeout. But each of its connections has the listening port of one of the
members at one end, and shutting the connections down fails every work in milliseconds, here and,
because the peers' sockets close, there. Linux only (`/proc/self/fd`).

All but one kind: a message of which some bytes are under way already. Of a connection that closes
gloo tells the operations that have not begun, and forgets the one in the middle (of those that
have, `Pair::signalException` in its transport/tcp/pair.cc tells bound buffers only; seen with torch
2.13); that one ends by its timeout. Gloo's own threads read and write it, whatever this process
does, so while the peer lives it arrives: a connection is shut down once nothing moves on it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

logger = logging.getLogger(__name__)

Address = tuple[str, int]
"""Host and port."""

QUIET_S = 0.05
"""Seconds without a byte after which nothing is under way on a connection."""

STALL_S = 0.25
"""The same for a connection on which bytes have moved meanwhile: longer than TCP waits before it
sends again what was lost (200 ms on Linux, at least)."""

DRAIN_S = 30.0
"""Seconds given to what is under way, at most."""

_COUNTERS = slice(120, 136)
"""`tcpi_bytes_acked` and `tcpi_bytes_received` in Linux' `struct tcp_info` (linux/tcp.h)."""


class GlooSockets:
    """The connections of one rank in one gloo group, found by the addresses of its members."""

    def __init__(self) -> None:
        self._own: Address | None = None
        self._members: set[Address] = set()

    @contextmanager
    def noticing_listener(self) -> Iterator[None]:
        """Around the creation of the gloo device: notice the address that it listens on."""
        before = set(_listening())
        yield
        new = set(_listening()) - before
        if len(new) == 1:
            self._own = new.pop()
        else:
            # Another thread opened one too. Then works end by their timeouts only.
            logger.debug("the port of a gloo device could not be told from others: %s", sorted(new))

    def exchange(self, store: Store, rank: int, size: int) -> None:
        """Tell the members this rank's address, and take theirs. Collective.

        Errors: RuntimeError, as the store's own, for what no member has written there: stores take
        in what anybody sends.
        """
        host, port = self._own or ("", 0)
        store.set(f"address/{rank}", f"{host} {port}")
        told = [_address(store.get(f"address/{peer}"), peer) for peer in range(size)]
        self._members = {address for address in told if address[0]}

    def break_off(self) -> None:
        """Shut every connection of the group down, each once it is quiet. Idempotent; never raises.

        Returns after `QUIET_S` where nothing is under way, and at the latest after `DRAIN_S`.
        """
        draining = [_Draining(connection) for connection in self._connections()]
        self._own, self._members = None, set()
        end = time.monotonic() + DRAIN_S
        while draining:
            now = time.monotonic()
            draining = [each for each in draining if not each.shut(now, by_force=now >= end)]
            time.sleep(QUIET_S / 10)

    def _connections(self) -> Iterator[socket.socket]:
        """Duplicates of the group's; nobody else's is held open."""
        for connection in _sockets():
            if self._is_ours(connection):
                yield connection
            else:
                connection.close()

    def _is_ours(self, connection: socket.socket) -> bool:
        try:
            # First: the listening socket has no peer, and gloo would not survive its shutdown.
            peer = connection.getpeername()[:2]
            return connection.getsockname()[:2] == self._own or peer in self._members
        except OSError:  # not connected, or gone meanwhile
            return False


class _Draining:
    """A connection that is to be shut down, and is given up then."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._moved = _moved(connection)
        self._since = time.monotonic()
        self._quiet_s = QUIET_S

    def shut(self, now: float, *, by_force: bool) -> bool:
        """Whether it is shut down: as soon as it has been quiet for long enough, or by force."""
        moved = _moved(self._connection)
        if moved != self._moved:
            self._moved, self._since, self._quiet_s = moved, now, STALL_S
        if now - self._since < self._quiet_s and not by_force:
            return False
        with self._connection, suppress(OSError):  # gone meanwhile
            self._connection.shutdown(socket.SHUT_RDWR)
        return True


def _moved(connection: socket.socket) -> bytes:
    """Changes with every byte that arrives, or whose arrival is acknowledged."""
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[_COUNTERS]
    except OSError:  # gone meanwhile
        return b""


def _address(told: bytes, peer: int) -> Address:
    try:
        host, port = told.decode().split(" ")
        return host, int(port)
    except ValueError as error:
        msg = f"the store has {told[:40]!r} for the address of rank {peer}; somebody else wrote it"
        raise RuntimeError(msg) from error


def _listening() -> Iterator[Address]:
    for connection in _sockets():
        with connection:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                host, port = connection.getsockname()[:2]
                yield host, port


def _sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            yield connection
        else:
            connection.close()
