"""One control connection, as either side uses it."""

import threading
from collections import deque
from typing import Any, TypeVar

from rl_core.channel import Channel
from rl_core.deadlines import Deadline
from rl_core.errors import (
    MessageError,
    MiniRLError,
    PeerLostError,
    TransferError,
    TransferTimeoutError,
)
from rl_core.remote_errors import from_wire
from rl_core.transfer.messages import Failed, Message
from rl_core.transfer.watch import POLL_S, Watch

FAREWELL_S = 2.0
"""Seconds given to telling a peer about a failure, waiting for its turn to send included."""

LAST_WORDS_S = 0.5
"""Seconds given to reading what a peer said before the deadline passed: it may say why."""

T = TypeVar("T")


class _EndedError(Exception):
    """Sending was ended by its watch; the cause says why."""


class ControlEnd:
    """Messages to and from one peer, read ahead without waiting.

    One `Channel` a peer, instead of a broker socket for all: a peer's death closes its connection
    at once, a message is never dropped silently, and a slow peer holds up nobody else's messages.
    Sending is safe from several threads (an abort comes from another one), reading is not.
    """

    def __init__(self, channel: Channel, peer: str) -> None:
        """`peer` is what messages call the other side, such as `receiver 1`."""
        self.peer = peer
        self._channel = channel
        self._inbox: deque[Message] = deque()
        self._lost: PeerLostError | None = None
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Descriptor of the socket, for polling; -1 once closed, here or there."""
        return -1 if self._lost is not None else self._channel.fileno()

    def send(self, message: Message, watch: Watch) -> None:
        """Send one message; PeerLostError naming the peer if it is gone.

        While the peer does not read, `watch` is looked at; the connection is of no use after it.
        """

        def look() -> None:
            try:
                watch.check(f"{self.peer} to read")
            except MiniRLError as error:
                raise _EndedError from error

        try:
            with self._sending:
                self._channel.send(message, watch.deadline, look)
        except _EndedError as ended:
            raise ended.__cause__ or ended from None
        except TransferTimeoutError as error:
            raise TransferTimeoutError(f"{self.peer} does not read: {error}") from error
        except TransferError as error:
            self._pump_last_words(watch.deadline)
            raise self._went_away(error) from error

    def read(self, deadline: Deadline) -> None:
        """Read what has arrived, without waiting for more; that the peer is gone is only noted.

        What it said before counts: a peer that has said its last word may leave at once. Of a
        message that has arrived in part the rest is read by a later call.

        Errors: what the peer reported as its failure, MessageError.
        """
        if self._lost is None and self._channel.fileno() < 0:
            self._lost = self._went_away("the connection was closed")
        while self._lost is None and self._channel.poll(0):
            try:
                self._inbox.append(
                    self._receive(Deadline.after(LAST_WORDS_S if deadline.expired else POLL_S))
                )
            except PeerLostError as error:
                self._lost = error
            except TransferTimeoutError:
                if deadline.expired:
                    raise
                return

    def pump(self, deadline: Deadline) -> None:
        """As `read`; PeerLostError as soon as the peer is gone, for waits that need it alive."""
        self.read(deadline)
        if self._lost is not None:
            raise self._lost

    def wait(self, seconds: float) -> None:
        """Sleep until something has arrived, for at most `seconds`."""
        self._channel.poll(seconds)

    def take(self, kind: type[T]) -> T | None:
        """The next message if it has been read already.

        Errors: MessageError if it is of another kind, PeerLostError if none can come any more.
        """
        if not self._inbox:
            if self._lost is not None:
                raise self._lost
            return None
        message = self._inbox.popleft()
        if not isinstance(message, kind):
            got, want = type(message).__name__, kind.__name__
            raise MessageError(f"{self.peer} sent {got} where {want} was due").blaming(self.peer)
        return message

    def report(self, failed: Failed) -> None:
        """Tell the peer about a failure, if it still listens. From any thread."""
        deadline = Deadline.after(FAREWELL_S)
        if not self._sending.acquire(timeout=FAREWELL_S):
            return
        try:
            self._channel.send(failed, deadline)
        except (TransferError, MessageError):
            return
        finally:
            self._sending.release()

    def close(self) -> None:
        """Close the connection; the peer sees it at once. Idempotent."""
        self._channel.close()

    def _receive(self, deadline: Deadline) -> Any:
        try:
            message = self._channel.receive(deadline)
        except TransferTimeoutError as error:
            raise TransferTimeoutError(f"{self.peer}: {error}") from error
        except TransferError as error:
            raise self._went_away(error) from error
        except MessageError as error:
            raise MessageError(f"{self.peer}: {error}").blaming(self.peer) from error
        if isinstance(message, Failed):
            raise from_wire(message.error)
        return message

    def _went_away(self, why: object) -> PeerLostError:
        return PeerLostError(f"{self.peer} went away: {why}").blaming(self.peer)

    def _pump_last_words(self, deadline: Deadline) -> None:
        """Raise what the peer said before it closed, if it said why."""
        self.pump(deadline.sooner(FAREWELL_S))
