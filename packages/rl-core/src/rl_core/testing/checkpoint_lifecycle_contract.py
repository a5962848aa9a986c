"""Calls in the wrong order are refused, closing is idempotent, nothing is kept that piles up."""

import time
from collections.abc import Mapping
from typing import ClassVar

import pytest

from rl_core.digests import XXH3_128
from rl_core.errors import LifecycleError, MiniRLError
from rl_core.testing.checkpoint_assertions import assert_arrived, assert_ended
from rl_core.testing.checkpoint_case import CheckpointCase
from rl_core.testing.checkpoint_group import Terms, TransferGroup
from rl_core.testing.checkpoint_orders import Held, Mishap
from rl_core.testing.checkpoint_samples import SMALL, many_buckets
from rl_core.testing.contract import Contract

GROWTH_BYTES = 8 << 20
"""What an allocator may take for itself while nothing accumulates."""

FAILURES = 4

CLOSED_S = 5.0
"""Native transports close their sockets in threads of their own, after `shutdown` has returned."""


class LifecycleContract(Contract, contract=True):
    """Order of calls, and what an engine holds."""

    many_syncs: ClassVar[int] = 20

    def test_transfer_before_the_group_is_built(self, case: CheckpointCase) -> None:
        """LifecycleError on every side, with the stream drained."""
        group = _unbuilt(case)
        outcome = group.transfer(SMALL, SMALL.manifest(case.version()), deadline_s=5)
        assert_ended(outcome, dict.fromkeys(("sender 0", "receiver 0"), LifecycleError))
        assert outcome.sent[0] is not None
        assert outcome.sent[0].exhausted, "the stream was not drained"
        group.prepare()
        outcome = group.transfer(SMALL, SMALL.manifest(case.version()), deadline_s=5)
        assert_ended(outcome, dict.fromkeys(("sender 0", "receiver 0"), LifecycleError))
        group.finalize(success=False)
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_group_is_built_before_prepare(self, case: CheckpointCase) -> None:
        """A place among endpoints of other engines is no substitute for one's own."""
        group = _unbuilt(case)
        endpoints = group.prepare()
        places = group.places(endpoints)
        fresh = _unbuilt(case)
        for member in fresh.members:
            with pytest.raises(LifecycleError):
                member.handle.call("build", places[str(member)], 5.0, timeout=case.deadline_s)
        assert_arrived(fresh.sync(SMALL), SMALL, XXH3_128)

    def test_wrong_role(self, case: CheckpointCase) -> None:
        """A receiver does not send, a sender does not receive."""
        group = case.group()
        case.dirty = True
        assert not group.connect()
        swapped = TransferGroup(group.members, case)
        for member in swapped.members:
            member.role = "receiver" if member.role == "sender" else "sender"
        try:
            outcome = swapped.transfer(SMALL, SMALL.manifest(case.version()), deadline_s=5)
        finally:
            for member in swapped.members:
                member.role = "receiver" if member.role == "sender" else "sender"
        for rank in (0, 1):
            for end in (outcome.sent[rank], outcome.received[rank]):
                assert end is not None
                assert isinstance(end.error, LifecycleError), repr(end.error)
        group.finalize(success=False)
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_second_transfer_without_finalize(self, case: CheckpointCase) -> None:
        """A sync is closed before the next one."""
        group = case.group()
        case.dirty = True
        assert not group.connect()
        first = group.transfer(SMALL, SMALL.manifest(case.version()))
        assert_arrived(first, SMALL, XXH3_128)
        second = group.transfer(SMALL, SMALL.manifest(case.version()), deadline_s=5)
        assert_ended(second, dict.fromkeys(("sender 0", "receiver 0"), LifecycleError))
        group.finalize(success=False)
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_finalize_is_idempotent(self, case: CheckpointCase) -> None:
        """Before anything, twice after a success, twice after a failure."""
        group = _unbuilt(case)
        for success in (True, True, False, False):
            assert not group.finalize(success)
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)
        for success in (True, False, True):
            assert not group.finalize(success)
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_abort_without_a_transfer(self, case: CheckpointCase) -> None:
        """Aborting what is not under way does no harm to what follows."""
        group = case.group()
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)
        for member in group.members:
            member.handle.call("abort", "for nothing", timeout=case.deadline_s)
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_topology_is_pure(self, case: CheckpointCase) -> None:
        """Same endpoints, same places; every rank has one, in rank order."""
        group = case.group()
        endpoints = group.prepare()
        senders = [endpoints[str(member)] for member in group.senders]
        receivers = [endpoints[str(member)] for member in group.receivers]
        places = case.engine_cls.build_topology(senders, receivers)
        assert places == case.engine_cls.build_topology(senders, receivers)
        assert {role: len(found) for role, found in places.items()} == {
            "sender": len(senders),
            "receiver": len(receivers),
        }
        taking_part = [place for found in places.values() for place in found if place.rank >= 0]
        assert sorted(place.rank for place in taking_part) == list(range(len(taking_part)))
        assert {place.world_size for place in taking_part} == {len(taking_part)}
        assert all(place.rank >= 0 for place in places["receiver"])
        assert places["sender"][0].rank >= 0

    def test_topology_without_a_side(self, case: CheckpointCase) -> None:
        """No sender, or no receiver: an error of this project."""
        group = case.group()
        endpoints = group.prepare()
        for senders, receivers in (
            ([], [endpoints["receiver 0"]]),
            ([endpoints["sender 0"]], []),
        ):
            with pytest.raises(MiniRLError):
                case.engine_cls.build_topology(senders, receivers)

    def test_nothing_piles_up(self, case: CheckpointCase) -> None:
        """Files, threads, sockets and memory stay where they were after the first syncs."""
        group = case.group()
        for _ in range(5):
            assert group.sync(SMALL).ok
        before = _held(group)
        for _ in range(self.many_syncs):
            assert group.sync(SMALL).ok
        for name, after in _held(group).items():
            assert after.descriptors <= before[name].descriptors, f"{name} opens files"
            assert after.threads <= before[name].threads, f"{name} starts threads"
            assert after.listening == before[name].listening, f"{name} opens sockets"
            assert after.shared <= before[name].shared, f"{name} maps more shared memory"
            grown = after.resident - before[name].resident
            assert grown < GROWTH_BYTES, f"{name} has grown by {grown} bytes"

    def test_failures_leave_nothing(self, case: CheckpointCase) -> None:
        """After failed syncs a good one holds what a good one held before them."""
        group, plenty = case.group(), many_buckets(4)
        for _ in range(2):
            assert group.sync(plenty).ok
        before = _held(group)
        for _ in range(FAILURES):
            fault = {"sender 0": {"mishap": Mishap(3, "raise")}}
            assert not group.sync(plenty, None, fault, case.deadline_s).ok
        assert group.sync(plenty).ok
        for name, after in _settled(group, before).items():
            assert len(after.listening) <= len(before[name].listening), f"{name} keeps sockets open"
            assert after.descriptors <= before[name].descriptors, f"{name} keeps files open"
            assert after.threads <= before[name].threads, f"{name} keeps threads"
            assert after.shared <= before[name].shared, f"{name} keeps shared memory"

    def test_shutdown_gives_everything_back(self, case: CheckpointCase) -> None:
        """Twice without harm; no socket listens afterwards; a new engine works."""
        group = case.group()
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)
        case.dirty = True
        for _ in range(2):
            for member in group.members:
                member.handle.call("shutdown", timeout=case.deadline_s)
        for name, after in _settled(group, {}).items():
            assert not after.listening, f"{name} still listens on {after.listening}"
        plenty = many_buckets()
        assert_arrived(case.group().sync(plenty), plenty, XXH3_128)


def _held(group: TransferGroup) -> dict[str, Held]:
    return {str(member): member.handle.call("held", timeout=30) for member in group.members}


def _settled(group: TransferGroup, before: Mapping[str, Held]) -> dict[str, Held]:
    """What is held once no more sockets listen than before, or after `CLOSED_S`."""
    end = time.monotonic() + CLOSED_S
    while True:
        held = _held(group)
        allowed = {name: len(before[name].listening) if before else 0 for name in held}
        settled = all(len(found.listening) <= allowed[name] for name, found in held.items())
        if settled or time.monotonic() >= end:
            return held
        time.sleep(0.1)


def _unbuilt(case: CheckpointCase) -> TransferGroup:
    """A group of new engines."""
    case.dirty = True
    group = case.group(terms=Terms(options=case.options))
    case.dirty = True
    return group
