"""Who is at fault, by what the members of a failed transfer say."""

import pytest

from minirl.ray_launcher import ForeignError, MemberDiedError
from minirl.replica_faults import faults_in_closing, faults_in_transfer, faults_of
from minirl.worker_calls import Witness
from rl_core.errors import (
    DigestMismatchError,
    LifecycleError,
    PeerLostError,
    RolloutError,
    TransferError,
    TransferTimeoutError,
)

TP_SIZE = 2


def actor(error):
    return Witness("actor", 0, error)


def receiver(rank, error):
    return Witness("checkpoint_worker", rank, error)


DIED = MemberDiedError("checkpoint_worker rank 2 died")
OWN = DigestMismatchError("a tensor differs", ["a"])
CUT = TransferError("the wire was cut")
LATE = TransferTimeoutError("nothing came")


def lost(who):
    return PeerLostError(f"{who} went away").blaming(who)


def heard(who):
    return LifecycleError(f"{who}: it failed").blaming(who)


@pytest.mark.parametrize(
    ("said", "replicas"),
    [
        ([receiver(2, DIED), actor(lost("receiver 2")), receiver(0, CUT)], [1]),
        ([actor(CUT), receiver(0, RolloutError("collateral")), receiver(2, DIED)], [1]),
        ([receiver(3, OWN), actor(heard("receiver 3")), receiver(0, heard("receiver 3"))], [1]),
        ([receiver(1, ForeignError("ValueError: no")), actor(CUT)], [0]),
        ([actor(lost("receiver 1")), receiver(1, lost("sender")), receiver(2, CUT)], [0]),
        ([receiver(0, OWN), receiver(2, OWN)], [0, 1]),
        ([receiver(2, CUT.__class__("engine").blaming("receiver 2"))], [1]),
        # Nobody can be named.
        ([actor(LATE), receiver(0, LATE), receiver(2, LATE)], []),
        ([receiver(2, CUT), receiver(0, lost("sender"))], []),
        # The sender failed: whatever else is said follows from it.
        ([actor(LifecycleError("no weights")), receiver(0, heard("sender 0"))], []),
        ([actor(MemberDiedError("actor rank 0 died")), receiver(2, lost("sender"))], []),
        ([], []),
    ],
)
def test_a_replica_is_named_by_evidence_only(said, replicas):
    for order in (said, said[::-1]):
        assert sorted(faults_in_transfer(order, TP_SIZE)) == replicas


def test_the_reason_is_what_was_said():
    found = faults_in_transfer([receiver(3, OWN)], TP_SIZE)
    assert found == {1: "DigestMismatchError: a tensor differs"}


@pytest.mark.parametrize(
    ("origin", "replicas"), [("replica 1", [1]), ("receiver 1", [0]), ("sender 0", []), ("", [])]
)
def test_the_origin_of_an_error(origin, replicas):
    assert list(faults_of(RolloutError("x").blaming(origin), TP_SIZE)) == replicas


def test_a_standard_error_names_nobody():
    assert faults_of(TimeoutError("x"), TP_SIZE) == {}


@pytest.mark.parametrize(
    ("said", "asked", "replicas"),
    [
        ([receiver(2, LATE)], 4, [1]),
        ([receiver(2, LATE), actor(LATE)], 4, [1]),
        ([receiver(0, LATE)], 1, [0]),
        # Nobody answers: then it may be anybody.
        ([receiver(0, LATE), receiver(1, LATE)], 2, []),
        ([receiver(0, LATE), actor(LATE)], 1, []),
        ([receiver(0, DIED), receiver(1, DIED)], 2, [0]),
        ([actor(LATE)], 2, []),
        ([], 2, []),
    ],
)
def test_silence_tells_only_while_others_answer(said, asked, replicas):
    assert sorted(faults_in_closing(said, asked, TP_SIZE)) == replicas
