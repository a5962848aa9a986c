"""What strangers send to the control endpoint is never accepted, and never hurts a sync."""

import contextlib
import socket
from enum import StrEnum

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_core.channel import new_key
from rl_core.digests import XXH3_128
from rl_core.errors import WeightSyncError
from rl_core.interfaces import Endpoint
from rl_core.testing.checkpoint_assertions import assert_arrived
from rl_core.testing.checkpoint_case import CheckpointCase
from rl_core.testing.checkpoint_group import Terms
from rl_core.testing.checkpoint_samples import SMALL, many_buckets
from rl_core.testing.contract import Contract


class CheckpointCapability(StrEnum):
    """What a checkpoint backend may lack, if it says why."""

    PRIVATE_SOCKETS = "listens on the interface that it was given, and on no other"
    BOUNDED_MEMORY = "needs at most two buckets and the largest tensor more"


_MESSAGES = st.lists(
    st.one_of(
        st.binary(max_size=300),
        st.just(b"\x00" * 64),
        st.just(b"\xff" * 64),
        st.just(b"GET / HTTP/1.1\r\n\r\n"),
        st.just((1 << 31).to_bytes(4, "big") + b"x" * 100),
    ),
    min_size=1,
    max_size=4,
)


class SecurityContract(Contract, contract=True):
    """Fuzzed and forged messages, wrong keys, open doors."""

    def forge(self, endpoint: Endpoint, messages: list[bytes]) -> None:
        """Send what no member would send to the control endpoint of a rank.

        This one knows `tcp:host:port`, `tcp://host:port` and `unix:name` and writes the bytes to
        a plain connection. Messages that are well formed are forged by `ChannelContract`, for
        engines over `rl_core.transfer`; a backend with another protocol overrides this and forges
        frames of its own with these contents, replayed and with wrong authentication.
        """
        with contextlib.suppress(OSError), _connection(endpoint.address) as connection:
            connection.settimeout(2)
            for message in messages:
                connection.sendall(message)

    def test_forged_messages_between_syncs(self, case: CheckpointCase) -> None:
        """Garbage to every rank, then a sync as if nothing had been."""
        group = case.group()

        @settings(
            max_examples=8,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(messages=_MESSAGES)
        def run(messages: list[bytes]) -> None:
            for endpoint in group.prepare().values():
                self.forge(endpoint, messages)
            assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

        run()

    def test_forged_messages_during_a_sync(self, case: CheckpointCase) -> None:
        """Garbage while the group is new and while a receiver holds its leases."""
        weights = many_buckets(4)
        case.dirty = True
        group = case.group()
        case.dirty = True
        endpoints = group.prepare()
        for endpoint in endpoints.values():
            self.forge(endpoint, [b"\x00" * 200])
        assert not group.build(group.places(endpoints), case.deadline_s)
        manifest = weights.manifest(case.version())
        pending = group.begin(weights, manifest, {"receiver 0": {"hold_s": 0.1}})
        for number in range(6):
            for endpoint in endpoints.values():
                self.forge(endpoint, [bytes([number]) * 200, manifest.structure_hash.encode()])
        outcome = group.end(pending, manifest)
        group.finalize(outcome.ok)
        assert_arrived(outcome, weights, XXH3_128)

    @pytest.mark.parametrize("name", ["sender 0", "receiver 0"])
    def test_member_with_another_key(self, case: CheckpointCase, name: str) -> None:
        """It gets nothing and gives nothing, and all end in time."""
        case.dirty = True
        group = case.group()
        terms = Terms(options=case.options)
        case.construct([group.member(name)], terms, key=new_key())
        outcome = group.sync(SMALL, deadline_s=case.fault_deadline_s)
        errors = outcome.errors
        for member in ("sender 0", name):
            assert isinstance(errors.get(member), WeightSyncError), f"{member}: {errors}"
        receivers = [end for end in outcome.received.values() if end is not None]
        if name == "receiver 0":
            receivers = receivers[:1]
        assert not any(end.leases for end in receivers), "weights went to or came from a stranger"
        case.dirty = True
        assert_arrived(case.group().sync(SMALL), SMALL, XXH3_128)

    def test_listens_on_its_own_interface(self, case: CheckpointCase) -> None:
        """Nothing listens on all interfaces."""
        self.need(CheckpointCapability.PRIVATE_SOCKETS)
        group = case.group()
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)
        for member in group.members:
            held = member.handle.call("held", timeout=case.deadline_s)
            doors = [address for address in held.listening if not address.startswith("127.")]
            assert not doors, f"{member} listens on {doors}"


def _connection(address: str) -> socket.socket:
    kind, _, rest = address.partition(":")
    if kind == "unix":
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.connect(f"\0{rest}")
        return local
    host, _, port = rest.removeprefix("//").rpartition(":")
    if kind != "tcp" or not port.isdigit():
        raise OSError(f"no address to connect to: {address!r}")
    return socket.create_connection((host, int(port)), timeout=2)
