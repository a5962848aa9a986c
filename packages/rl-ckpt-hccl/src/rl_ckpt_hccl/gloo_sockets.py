"""Ending a gloo group at once, also while it blocks.

Gloo cannot be interrupted: `abort` does nothing, and destroying a group waits for its works, which
wait for a peer or a timeout. But each of its connections has the listening port of one of the
members at one end, and shutting the connections down fails every work in milliseconds, here and,
because the peers' sockets close, there. Linux only (`/proc/self/fd`).
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

logger = logging.getLogger(__name__)


class GlooSockets:
    """The connections of one rank in one gloo group, found by the ports of its members."""

    def __init__(self) -> None:
        self._port = 0
        self._peers: set[int] = set()

    @contextmanager
    def noticing_listener(self) -> Iterator[None]:
        """Around the creation of the gloo device: notice the port that it listens on."""
        before = {port for port, _ in _listening()}
        yield
        new = {port for port, _ in _listening()} - before
        if len(new) == 1:
            self._port = new.pop()
        else:
            # Another thread opened one too. Then works end by their timeouts only.
            logger.debug("the port of a gloo device could not be told from others: %s", sorted(new))

    def exchange(self, store: Store, rank: int, size: int) -> None:
        """Tell the members this rank's port, and take theirs. Collective."""
        store.set(f"port/{rank}", str(self._port))
        self._peers = {int(store.get(f"port/{peer}")) for peer in range(size)} - {0}

    def break_off(self) -> None:
        """Shut every connection of the group down. Idempotent; never raises."""
        for connection in _sockets():
            with connection:
                try:
                    ports = connection.getsockname()[1], connection.getpeername()[1]
                    if (self._port and ports[0] == self._port) or ports[1] in self._peers:
                        connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # not connected, or gone meanwhile
                    continue
        self._port, self._peers = 0, set()


def _listening() -> Iterator[tuple[int, str]]:
    for connection in _sockets():
        with connection:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                host, port = connection.getsockname()[:2]
                yield port, host


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
