"""A receiver's end of the control plane: its connection to the sender."""

import time
from typing import TypeVar

from rl_core.channel import connect
from rl_core.deadlines import Deadline
from rl_core.errors import TransferError, TransferTimeoutError
from rl_core.remote_errors import to_wire
from rl_core.transfer.control import ControlEnd
from rl_core.transfer.messages import Failed, Join, Message, ToReceiver
from rl_core.transfer.watch import POLL_S, Watch

T = TypeVar("T")


class Link:
    """What one receiver says to and hears from the sender."""

    def __init__(self, end: ControlEnd) -> None:
        self._end = end

    @classmethod
    def join(cls, address: str, key: bytes, join: Join, watch: Watch) -> "Link":
        """Connect to the sender and ask to be let in; tries again until the sender listens."""
        while True:
            watch.check(f"the sender at {address} to listen")
            try:
                channel = connect(address, key, ToReceiver, watch.deadline.sooner(5.0))
                break
            except TransferTimeoutError:
                continue
            except TransferError:
                time.sleep(POLL_S)
        link = cls(ControlEnd(channel, "sender"))
        link.tell(join, watch)
        return link

    def tell(self, message: Message, watch: Watch) -> None:
        """Send one message."""
        self._end.send(message, watch)

    def expect(self, kind: type[T], watch: Watch) -> T:
        """Wait for the next message, which must be of `kind`.

        Errors: what the sender reported, PeerLostError if it is gone, MessageError.
        """
        while True:
            self._end.read(watch.deadline)
            message = self._end.take(kind)
            if message is not None:
                return message
            watch.check(f"{kind.__name__} from the sender")
            self._end.wait(POLL_S)

    def pump(self, deadline: Deadline) -> None:
        """Read what has arrived; raises what the sender reported, or that it is gone."""
        self._end.pump(deadline)

    def report(self, error: BaseException, where: str) -> None:
        """Tell the sender, if it still listens, that the sync has failed here."""
        self._end.report(Failed(to_wire(error, where)))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._end.close()
