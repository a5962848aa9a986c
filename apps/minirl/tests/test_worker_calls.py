import itertools

import pytest

from minirl.ray_launcher import ForeignError, MemberDiedError
from minirl.worker_calls import root_cause
from rl_core.errors import DigestMismatchError, PeerLostError, TransferError, TransferTimeoutError

DEAD = MemberDiedError("actor rank 0 died")
ENGINE = TransferError("the engine failed during an update: the engine died")
DIGEST = DigestMismatchError("a tensor differs", ["a"])
FOREIGN = ForeignError("actor rank 1: RuntimeError: connection reset")
LOST = PeerLostError("receiver 0: connection lost")
LATE = TransferTimeoutError("deadline passed")


@pytest.mark.parametrize(
    ("errors", "cause"),
    [
        ([FOREIGN, DEAD, LOST], DEAD),
        ([LOST, ENGINE], ENGINE),
        ([LOST, FOREIGN], FOREIGN),
        ([LATE, DIGEST], DIGEST),
        ([FOREIGN, LATE, ENGINE], ENGINE),
        ([LATE], LATE),
    ],
)
def test_the_cause_is_named_and_not_how_others_noticed(errors, cause):
    assert all(root_cause(order) is cause for order in itertools.permutations(errors))


def test_among_equals_the_first():
    assert root_cause([ENGINE, DIGEST]) is ENGINE
