"""Whatever happens to one rank, the others end in time with the cause, and go on without it."""

import time
from collections.abc import Mapping
from typing import ClassVar

import pytest

from rl_core.digests import XXH3_128
from rl_core.errors import (
    LifecycleError,
    MiniRLError,
    TransferError,
    TransferTimeoutError,
    WeightSyncError,
)
from rl_core.testing.checkpoint_assertions import (
    assert_arrived,
    assert_drained,
    assert_ended,
    describe,
)
from rl_core.testing.checkpoint_case import CheckpointCase
from rl_core.testing.checkpoint_faults import CheckpointFault, FaultHook
from rl_core.testing.checkpoint_group import Outcome, TransferGroup
from rl_core.testing.checkpoint_orders import Mishap
from rl_core.testing.checkpoint_samples import SMALL, many_buckets
from rl_core.testing.contract import Contract

PLENTY = many_buckets(10)
"""More than any engine can have on the way at once."""

LONGER_S = 3.0
"""By so much a stall outlasts the deadline, where the order of the ends counts."""

HARMED = PLENTY.tensors[7].name


class FailureContract(Contract, contract=True):
    """Deaths, stalls, cancellation, aborts, and damage on the way."""

    faults: ClassVar[Mapping[CheckpointFault, FaultHook]] = {}

    @pytest.mark.parametrize("at", [0, 13])
    def test_sender_dies(self, case: CheckpointCase, at: int) -> None:
        """Receivers end; with a sender in its place the same engines go on."""
        group = case.group()
        outcome = _sync(group, case, "sender 0", Mishap(at, "die"))
        assert_ended(outcome, _others("receiver 0", "receiver 1", error=WeightSyncError))
        assert_drained(outcome, PLENTY, (1,))
        _assert_goes_on(case)

    @pytest.mark.parametrize(
        ("receivers", "dying", "at"),
        [(2, 0, 4), (2, 1, 4), (3, 1, 0)],
        ids=["first", "last", "mid"],
    )
    def test_receiver_dies(self, case: CheckpointCase, receivers: int, dying: int, at: int) -> None:
        """Wherever it stands, all others end and the sender says who died; they go on without it.

        Where bytes are relayed, the position decides who loses its source and who its reader.
        """
        group = case.group(2, receivers)
        outcome = _sync(group, case, f"receiver {dying}", Mishap(at, "die"))
        assert_ended(outcome, _others("sender 0", error=TransferError), f"receiver {dying}")
        assert_ended(outcome, _receivers(receivers, dying, error=WeightSyncError))
        assert_drained(outcome, PLENTY, (0, 1))
        survivors = group.survivors()
        assert_arrived(survivors.sync(SMALL), SMALL, XXH3_128)
        _assert_goes_on(case)

    def test_receiver_dies_in_the_last_lease(self, case: CheckpointCase) -> None:
        """Bytes that were handed over are not yet bytes that were read: nobody has succeeded."""
        group = case.group()
        mishaps = {"receiver 1": {"mishap": Mishap(0, "die")}}
        outcome = group.sync(SMALL, None, mishaps, case.fault_deadline_s)
        assert_ended(outcome, _others("sender 0", error=TransferError), "receiver 1")
        assert_ended(outcome, _receivers(2, 1, error=WeightSyncError))
        _assert_goes_on(case)

    @pytest.mark.parametrize("name", ["sender 0", "receiver 0"])
    def test_rank_is_gone_before_the_group_is_built(self, case: CheckpointCase, name: str) -> None:
        """Its endpoint is known, but nobody answers there: building ends, with an error."""
        case.dirty = True
        group = case.group()
        endpoints = group.prepare()
        places = group.places(endpoints)
        case.dismiss(group.member(name))
        failed = group.survivors().build(places, case.fault_deadline_s)
        noticing = {"sender 0": ["receiver 0", "receiver 1"], "receiver 0": ["sender 0"]}[name]
        for member in noticing:
            assert isinstance(failed.get(member), WeightSyncError), f"{member}: {failed}"
        group.finalize(success=False)
        _assert_goes_on(case)

    def test_receiver_stalls(self, case: CheckpointCase) -> None:
        """Its peers do not wait for longer than their deadline."""
        group = case.group()
        mishap = Mishap(1, "stall", case.fault_deadline_s + 1)
        outcome = _sync(group, case, "receiver 0", mishap)
        assert_ended(outcome, _others("sender 0", error=TransferTimeoutError))
        assert_ended(outcome, _others("receiver 0", "receiver 1", error=WeightSyncError))
        assert_drained(outcome, PLENTY, (0, 1))
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_only_receiver_stalls(self, case: CheckpointCase) -> None:
        """Nobody else is there to notice: the sender's own deadline ends its wait."""
        group = case.group(1, 1)
        mishap = Mishap(1, "stall", case.fault_deadline_s + LONGER_S)
        outcome = _sync(group, case, "receiver 0", mishap)
        assert_ended(outcome, _others("sender 0", error=TransferTimeoutError))
        assert_ended(outcome, _others("receiver 0", error=WeightSyncError))
        sent, received = outcome.sent[0], outcome.received[0]
        assert sent is not None
        assert received is not None
        late = sent.ended_at - received.last_exit_at
        assert late < 0, f"the sender waited until the receiver woke up, and for {late:.1f} s more"
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_sender_stalls(self, case: CheckpointCase) -> None:
        """A trainer that does not go on: the receivers end by their deadline."""
        group = case.group()
        mishap = Mishap(5, "stall", case.fault_deadline_s + 1)
        outcome = _sync(group, case, "sender 0", mishap)
        waiting = _others("receiver 0", "receiver 1", error=TransferTimeoutError)
        assert_ended(outcome, waiting)
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_stream_fails(self, case: CheckpointCase) -> None:
        """The trainer's own error comes out of its sender, and its text out of the receivers."""
        group = case.group()
        outcome = _sync(group, case, "sender 0", Mishap(7, "raise"))
        everybody = _others("sender 0", "receiver 0", "receiver 1", error=MiniRLError)
        assert_ended(outcome, everybody, "the test's own mishap")
        assert_drained(outcome, PLENTY, (1,))
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_consumer_fails(self, case: CheckpointCase) -> None:
        """The error of an engine that cannot load is heard by the sender."""
        group = case.group()
        outcome = _sync(group, case, "receiver 0", Mishap(2, "raise"))
        heard = _others("sender 0", "receiver 0", "receiver 1", error=MiniRLError)
        assert_ended(outcome, heard, "the test's own mishap")
        assert_drained(outcome, PLENTY, (0, 1))
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    def test_consumer_leaves(self, case: CheckpointCase) -> None:
        """A consumer that stops asking is a failed receiver, not a finished one."""
        group = case.group()
        orders = {"receiver 1": {"leave_at": 1}}
        outcome = group.sync(PLENTY, None, orders, case.fault_deadline_s)
        assert_ended(outcome, _others("sender 0", "receiver 0", error=WeightSyncError))
        assert_drained(outcome, PLENTY, (0, 1))
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    @pytest.mark.parametrize("name", ["sender 0", "receiver 1"])
    @pytest.mark.parametrize("kind", ["cancel", "abort"])
    def test_cancelled_or_aborted(self, case: CheckpointCase, name: str, kind: str) -> None:
        """Both end the rank itself and tell the others why."""
        group = case.group()
        outcome = _sync(group, case, name, Mishap(3, kind, 5.0))
        said = "the test cancelled" if kind == "cancel" else "the test aborted"
        own = LifecycleError if kind == "cancel" else MiniRLError
        assert_ended(outcome, {name: own}, said)
        assert_ended(outcome, _others("sender 0", name, error=MiniRLError), said)
        assert_drained(outcome, PLENTY, (0, 1))
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    @pytest.mark.parametrize("name", ["sender 0", "receiver 0"])
    def test_cancelled_while_it_waits(self, case: CheckpointCase, name: str) -> None:
        """Cancellation wakes a rank that waits for a peer who does not come."""
        group = case.group()
        case.dirty = True
        assert not group.connect()
        manifest = SMALL.manifest(case.version())
        alone = TransferGroup([group.member(name)], case)
        pending = alone.begin(SMALL, manifest)
        time.sleep(0.2)
        alone.members[0].handle.call("cancel", "nobody came", timeout=case.grace_s)
        # Not the deadline of the transfer: cancelling is what ends it.
        outcome = alone.end(pending, manifest, case.fault_deadline_s)
        assert_ended(outcome, {name: LifecycleError}, "nobody came")
        group.finalize(success=False)
        assert_arrived(group.sync(SMALL), SMALL, XXH3_128)

    @pytest.mark.parametrize("fault", CheckpointFault, ids=lambda fault: fault.name.lower())
    def test_damage_on_the_way(self, case: CheckpointCase, fault: CheckpointFault) -> None:
        """Named on both sides, and gone with the next sync."""
        self.need(fault)
        assert fault in self.faults, f"give a hook for {fault.name} in `faults`, or say why not"
        hook = self.faults[fault]
        group = case.group()
        case.dirty = True
        assert not group.connect()
        harmed = group.member(hook.member)
        harmed.handle.call("arm", hook.function, HARMED, timeout=case.grace_s)
        manifest = PLENTY.manifest(case.version())
        outcome = group.transfer(PLENTY, manifest, deadline_s=case.fault_deadline_s)
        group.finalize(success=False)
        hurt = "receiver 0" if hook.member == "sender 0" else hook.member
        assert_ended(outcome, dict.fromkeys(("sender 0", "receiver 0", "receiver 1"), MiniRLError))
        error = outcome.errors[hurt]
        assert isinstance(error, fault.errors), describe(outcome)
        assert hook.named_in(error, HARMED), f"{HARMED!r} is not named in {error!r}"
        # A sender whose own deadline ends first knows for whom it waited.
        told = outcome.errors["sender 0"]
        assert hook.named_in(told, HARMED) or "receiver" in str(told), f"nothing is named: {told!r}"
        assert_drained(outcome, PLENTY, (0, 1))
        case.dirty = True
        assert_arrived(case.group().sync(SMALL), SMALL, XXH3_128)


def _sync(group: TransferGroup, case: CheckpointCase, name: str, mishap: Mishap) -> Outcome:
    return group.sync(PLENTY, None, {name: {"mishap": mishap}}, case.fault_deadline_s)


def _others(*names: str, error: type[MiniRLError]) -> dict[str, type[MiniRLError]]:
    return dict.fromkeys(names, error)


def _receivers(count: int, dead: int, error: type[MiniRLError]) -> dict[str, type[MiniRLError]]:
    """Those that are left."""
    return _others(*(f"receiver {rank}" for rank in range(count) if rank != dead), error=error)


def _assert_goes_on(case: CheckpointCase) -> None:
    """The survivors, with new processes in the place of those that died."""
    case.dirty = False  # the survivors' engines are to recover by themselves
    assert_arrived(case.group().sync(SMALL), SMALL, XXH3_128)
