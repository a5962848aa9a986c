"""Well-formed messages that are not what they should be: refused by name, or ignored.

For checkpoint engines whose control plane is `rl_core.transfer`: add `ChannelContract` to the bases
of the contract test. What does not even look like a message is in `SecurityContract`.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any

import pytest

from rl_core.channel import Channel, connect, new_key
from rl_core.deadlines import Deadline
from rl_core.digests import XXH3_128
from rl_core.errors import MessageError, MiniRLError, PeerLostError
from rl_core.testing.bucket_forgeries import BUCKET_FORGERIES
from rl_core.testing.channel_forgeries import FORGERIES, Forgery
from rl_core.testing.checkpoint_assertions import assert_arrived, assert_ended
from rl_core.testing.checkpoint_recipe import RUN_ID
from rl_core.testing.checkpoint_samples import SMALL
from rl_core.testing.contract import Contract
from rl_core.transfer.groups import group_name
from rl_core.transfer.messages import PROTOCOL, Done, Failed, Join, Joined, ToReceiver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_core.interfaces import Place
    from rl_core.testing.checkpoint_case import CheckpointCase

_KNOCK_S = 10.0

SILENT = 12
"""Strangers who connect and say nothing: one after the other they would use the time up."""


class ChannelContract(Contract, contract=True):
    """Forged, replayed and misplaced messages of members and of strangers."""

    @pytest.mark.parametrize("name", FORGERIES)
    def test_forged_message_of_a_member(self, case: CheckpointCase, name: str) -> None:
        """Nobody goes on with it: who hears it says what it was, and all end in time."""
        _assert_refused(case, FORGERIES[name])

    @pytest.mark.parametrize("name", BUCKET_FORGERIES)
    def test_forged_bucket_of_a_member(self, case: CheckpointCase, name: str) -> None:
        """As before, of messages about buckets; for engines that announce some."""
        _assert_refused(case, BUCKET_FORGERIES[name])

    def test_strangers_at_the_door(self, case: CheckpointCase) -> None:
        """Whoever comes while the group is built is told why not, or nothing; then all join."""
        case.dirty = True
        group = case.group()
        case.dirty = True
        places = group.places(group.prepare())
        door = group.member("sender 0")
        building = door.handle.submit("build", places["sender 0"], case.deadline_s)
        stranger = _Stranger(places["receiver 0"], case.key)
        with stranger.silence():
            heard = {name: knock() for name, knock in stranger.knocks().items()}
        with stranger.silence():
            others = group.without("sender 0").build(places, case.deadline_s)
            building.result(case.deadline_s + case.grace_s)
        assert not others
        assert heard == {name: _EXPECTED[name] for name in heard}
        assert set(heard) == set(_EXPECTED)
        manifest = SMALL.manifest(case.version())
        outcome = group.transfer(SMALL, manifest)
        group.finalize(outcome.ok)
        assert_arrived(outcome, SMALL, XXH3_128)


def _assert_refused(case: CheckpointCase, forgery: Forgery) -> None:
    for liar in forgery.members:
        group = case.group()
        case.dirty = True
        assert not group.connect()
        member = group.member(liar)
        member.handle.call("arm", forgery.function, "", timeout=case.grace_s)
        manifest = SMALL.manifest(case.version())
        outcome = group.transfer(SMALL, manifest, deadline_s=case.deadline_s)
        group.finalize(success=False)
        hearing = "receiver 0" if liar == "sender 0" else "sender 0"
        assert_ended(outcome, {hearing: forgery.error}, forgery.says)
        # The connection on which it was heard is closed: its other end learns no more.
        assert_ended(outcome, dict.fromkeys((liar, "receiver 1"), MiniRLError))
        case.dirty = False  # the same engines are to recover
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)


_EXPECTED = {
    "another key": "closed",
    "a recorded connection": "closed",
    "signed otherwise": "closed",
    "a number left out": "closed",
    "another protocol": "MessageError",
    "another run": "StaleVersionError",
    "another group": "LifecycleError",
    "another rank": "MessageError",
    "not a Join": "MessageError",
}
"""What strangers hear: kind of the error that they are told, or that the connection is closed."""


class _Stranger:
    """Somebody who reaches the sender, with the key of the run or without."""

    def __init__(self, place: Place, key: bytes) -> None:
        self._address = place.endpoints[0].address
        self._key = key
        self._join = Join(PROTOCOL, RUN_ID, place.rank, group_name(RUN_ID, place))

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """As long as the block, many connections in which nothing is said."""
        host, _, port = self._address.removeprefix("tcp:").rpartition(":")
        with contextlib.ExitStack() as silent:
            for _ in range(SILENT):
                connection = socket.create_connection((host, int(port)), timeout=_KNOCK_S)
                silent.enter_context(connection)
            yield

    def knocks(self) -> dict[str, Callable[[], str]]:
        """Ways to ask for entry, by name; each returns what was heard."""
        join = self._join
        said = {
            "another protocol": Join(PROTOCOL + 1, join.run_id, join.rank, join.group),
            "another run": Join(PROTOCOL, "another", join.rank, join.group),
            "another group": Join(PROTOCOL, join.run_id, join.rank, "another"),
            "another rank": Join(PROTOCOL, join.run_id, 99, join.group),
            "not a Join": Done(),
        }
        return {
            "another key": lambda: self._knock(join, new_key()),
            "a recorded connection": self._replay,
            "signed otherwise": lambda: self._knock(join, self._key, _sign_otherwise),
            "a number left out": lambda: self._knock(join, self._key, _leave_out_a_number),
            **{name: _knocking(self._knock, message, self._key) for name, message in said.items()},
        }

    def _knock(
        self, message: Any, key: bytes, prepare: Callable[[Channel], None] = lambda _: None
    ) -> str:
        deadline = Deadline.after(_KNOCK_S)
        try:
            with connect(self._address, key, ToReceiver, deadline) as channel:
                prepare(channel)
                channel.send(message, deadline)
                return _heard(channel.receive(deadline))
        except (MessageError, PeerLostError):
            return "closed"

    def _replay(self) -> str:
        """What a member sent once, over a connection of one's own."""
        recorded = bytearray()
        with contextlib.suppress(MessageError, PeerLostError):
            _record(self._address, self._key, self._join, recorded)
        host, _, port = self._address.removeprefix("tcp:").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=_KNOCK_S) as connection:
            connection.sendall(recorded)
            nonce_and_proof = 16 + 32
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(4096):
                    nonce_and_proof -= len(part)
        return "closed" if nonce_and_proof >= 0 else "a message"


def _knocking(knock: Callable[..., str], *arguments: Any) -> Callable[[], str]:
    return lambda: knock(*arguments)


def _heard(message: Any) -> str:
    if isinstance(message, Failed):
        return message.error.kind
    return "let in" if isinstance(message, Joined) else type(message).__name__


def _sign_otherwise(channel: Channel) -> None:
    mac = channel._mac
    out = channel._out

    def otherwise(direction: bytes, number: int, payload: bytes) -> bytes:
        made = mac(direction, number, payload)
        return made[::-1] if direction == out else made

    channel._mac = otherwise  # type: ignore[method-assign]


def _leave_out_a_number(channel: Channel) -> None:
    channel._sent += 1


def _record(address: str, key: bytes, join: Join, sent: bytearray) -> None:
    """Be refused as a member of another group, and keep every byte that was sent."""
    send_all = Channel._send_all

    class Recording(Channel):
        def _send_all(self, data: bytes, *arguments: Any) -> None:
            sent.extend(data)
            send_all(self, data, *arguments)

    host, _, port = address.removeprefix("tcp:").rpartition(":")
    deadline = Deadline.after(_KNOCK_S)
    connection = socket.create_connection((host, int(port)), timeout=_KNOCK_S)
    refused = Join(join.protocol, join.run_id, join.rank, "another")
    with Recording(connection, key, ToReceiver, deadline, accepted=False) as channel:
        channel.send(refused, deadline)
        channel.receive(deadline)
