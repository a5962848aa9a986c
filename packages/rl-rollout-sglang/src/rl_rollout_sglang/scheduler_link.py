"""The server's end of its connections to the schedulers; see `scheduler_protocol`."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rl_core.channel import Channel, Listener, new_key
from rl_core.deadlines import Deadline
from rl_core.errors import MessageError, RolloutError, WeightSyncError
from rl_rollout_sglang.scheduler_protocol import Answer, Command, Hello

CONNECT_S = 60.0
"""Seconds for all schedulers to connect, once they were rung for the first time."""

CALL_S = 24 * 3600.0
"""Seconds for a call. Updates bring a deadline of their own, and a death closes the channel."""

POLL_S = 0.2


class SchedulerLink:
    """Calls a method of the extension in every scheduler. Used by one thread at a time."""

    def __init__(self, ranks: int) -> None:
        self.key = new_key()
        self._listener = Listener()
        self._ranks = ranks
        self._channels: dict[int, Channel] = {}
        self._number = 0
        self.peers: list[Hello] = []

    @property
    def address(self) -> str:
        """Where schedulers connect."""
        return self._listener.address

    def call(
        self, method: str, arguments: Sequence[Sequence[Any]], bell: Callable[[], None]
    ) -> list[Any]:
        """Run one call on all ranks; results in rank order.

        Args:
            method: of `SchedulerExtension`.
            arguments: positional arguments for each rank.
            bell: rings the schedulers, which come to read the call then.

        Errors: RolloutError naming the rank that failed or died.
        """
        bell()
        try:
            self._accept()
            self._number += 1
            for rank, values in enumerate(arguments):
                command = Command(self._number, method, msgspec.msgpack.encode(values))
                self._channels[rank].send(command, Deadline.after(CALL_S))
            answers = [self._answer(rank) for rank in range(self._ranks)]
        except WeightSyncError as error:
            raise RolloutError(f"the engine does not answer {method!r}: {error}") from error
        for rank, answer in enumerate(answers):
            if answer.failure is not None:
                raise RolloutError(f"{method!r} failed on rank {rank}: {answer.failure}")
        return [msgspec.msgpack.decode(answer.value) for answer in answers]

    def close(self) -> None:
        """End all connections. Idempotent."""
        for channel in self._channels.values():
            channel.close()
        self._listener.close()

    def _answer(self, rank: int) -> Answer:
        answer: Answer = self._channels[rank].receive(Deadline.after(CALL_S))
        if answer.number != self._number:
            raise MessageError(f"answer {answer.number}, expected {self._number}")
        return answer

    def _accept(self) -> None:
        deadline = Deadline.after(CONNECT_S)
        while len(self._channels) < self._ranks:
            channel = self._listener.accept(self.key, Hello | Answer, deadline)
            hello = channel.receive(deadline)
            if not isinstance(hello, Hello) or hello.rank in self._channels:
                raise MessageError(f"unexpected {hello} from a scheduler")
            self._channels[hello.rank] = channel
            self.peers = sorted([*self.peers, hello], key=lambda peer: peer.rank)
