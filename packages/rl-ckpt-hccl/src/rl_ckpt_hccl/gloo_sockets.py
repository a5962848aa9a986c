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

Address = tuple[str, int]
"""Host and port."""


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
        for connection in _sockets():
            with connection:
                try:
                    if self._is_ours(connection):
                        connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # not connected, or gone meanwhile
                    continue
        self._own, self._members = None, set()

    def _is_ours(self, connection: socket.socket) -> bool:
        # First: the listening socket has no peer, and gloo would not survive its shutdown.
        peer = connection.getpeername()[:2]
        return connection.getsockname()[:2] == self._own or peer in self._members


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
