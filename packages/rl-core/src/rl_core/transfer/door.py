"""Where receivers join a sender: strangers are turned away and keep nobody waiting."""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

from rl_core.channel import Channel, Listener, admit
from rl_core.deadlines import Deadline
from rl_core.errors import MessageError, MiniRLError, TransferError
from rl_core.remote_errors import to_wire
from rl_core.transfer.control import ControlEnd
from rl_core.transfer.messages import Failed, Join, Message, ToSender
from rl_core.transfer.watch import Watch

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Seconds given to one connecting peer."""

AT_ONCE = 64
"""Peers that are heard at the same time; more wait until one of them has had its time."""

_POLL_S = 0.05


class Door:
    """Hears every peer that connects in a thread of its own, for the length of a `with` block.

    Args:
        listener: where they connect.
        key: that they must hold.
        check: raises for a first message that is not the right `Join`.
    """

    def __init__(self, listener: Listener, key: bytes, check: Callable[[Message], None]) -> None:
        self._listener = listener
        self._key = key
        self._check = check
        self._knocking: dict[threading.Thread, socket.socket] = {}
        self._admitted: queue.SimpleQueue[tuple[Channel, Join]] = queue.SimpleQueue()

    def admitted(self, watch: Watch) -> list[tuple[Channel, Join]]:
        """Who has joined since the last call, after a short wait for somebody to connect."""
        self._forget_the_heard()
        if len(self._knocking) >= AT_ONCE:
            time.sleep(_POLL_S)
        elif self._listener.poll(_POLL_S):
            self._hear(watch.deadline.sooner(HANDSHAKE_S))
        return self._drain()

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *_: object) -> None:
        """Break off with whoever has not joined."""
        self._forget_the_heard()
        for connection in self._knocking.values():
            with contextlib.suppress(OSError):  # its thread has closed it
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._knocking:
            thread.join(HANDSHAKE_S)
        for late in self._drain():
            late[0].close()

    def _forget_the_heard(self) -> None:
        """Whose thread has ended was turned away, or has a channel that is not ours any more."""
        self._knocking = {each: its for each, its in self._knocking.items() if each.is_alive()}

    def _hear(self, deadline: Deadline) -> None:
        try:
            connection = self._listener.take(deadline)
        except TransferError as error:  # gone again
            logger.warning("refused a connection to the weight sender: %s", error)
            return
        thread = threading.Thread(target=self._admit, args=(connection, deadline), daemon=True)
        self._knocking[thread] = connection
        thread.start()

    def _admit(self, connection: socket.socket, deadline: Deadline) -> None:
        try:
            channel = admit(connection, self._key, ToSender, deadline)
        except (MessageError, TransferError) as error:
            logger.warning("refused a connection to the weight sender: %s", error)
            return
        try:
            join = channel.receive(deadline)
            self._check(join)
        except MiniRLError as error:
            logger.warning("refused to let a receiver join: %s", error)
            _refuse(channel, error)
            return
        self._admitted.put((channel, join))

    def _drain(self) -> list[tuple[Channel, Join]]:
        drained = []
        with contextlib.suppress(queue.Empty):
            while True:
                drained.append(self._admitted.get_nowait())
        return drained


def _refuse(channel: Channel, error: MiniRLError) -> None:
    end = ControlEnd(channel, "the refused peer")
    end.report(Failed(to_wire(error, "sender")))
    end.close()
