"""Ending a gloo group at once, also while it blocks.

Gloo cannot be interrupted: `abort` does nothing, and destroying a group waits for its works, which
wait for a peer or a timeout. But each of its connections has the listening port of one of the
members at one end, and shutting the connections down fails every work in milliseconds, here and,
because the peers' sockets close, there. Linux only (`/proc/self/fd`).

All but one kind: a message of which some bytes are under way already. Of a connection that closes
gloo tells the operations that have not begun, and forgets the one in the middle (of those that
have, `Pair::signalException` in its transport/tcp/pair.cc tells bound buffers only; seen with torch
2.13); that one ends by its timeout. Gloo's own threads read and write it, whatever this process
does, so while the peer lives it is over in a moment: connections are shut down once nothing moves.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

logger = logging.getLogger(__name__)

Address = tuple[str, int]
"""Host and port."""

QUIET_S = 0.05
"""Seconds without a byte after which nothing is under way."""

DRAIN_S = 0.5
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
        """Shut every connection of the group down. Idempotent; never raises."""
        with ExitStack() as stack:
            ours = [stack.enter_context(connection) for connection in self._connections()]
            _drain(ours)
            for connection in ours:
                with suppress(OSError):  # gone meanwhile
                    connection.shutdown(socket.SHUT_RDWR)
        self._own, self._members = None, set()

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


def _drain(connections: list[socket.socket]) -> None:
    """Until nothing has moved for `QUIET_S`, at most `DRAIN_S`."""
    end = time.monotonic() + DRAIN_S
    moved, since = [_moved(each) for each in connections], time.monotonic()
    while connections and time.monotonic() < min(end, since + QUIET_S):
        time.sleep(QUIET_S / 10)
        now = [_moved(each) for each in connections]
        if now != moved:
            moved, since = now, time.monotonic()


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
