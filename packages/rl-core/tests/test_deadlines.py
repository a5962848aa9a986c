import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.deadlines import CancelToken, Deadline
from rl_core.errors import LifecycleError, TransferTimeoutError


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_sooner_is_never_later(seconds, other):
    deadline = Deadline.after(seconds)
    assert deadline.sooner(other).at <= deadline.at
    assert 0 <= deadline.remaining() <= seconds


def test_an_expired_deadline_names_what_was_waited_for():
    deadline = Deadline.after(0)
    assert deadline.expired
    assert deadline.remaining() == 0
    with pytest.raises(TransferTimeoutError, match="waiting for rank 3"):
        deadline.check("rank 3")
    Deadline.after(60).check("nothing")


def test_the_first_reason_of_a_cancellation_counts():
    token = CancelToken()
    token.check()
    assert not token.cancelled
    token.cancel("peer died")
    token.cancel("and then this")
    assert token.cancelled
    with pytest.raises(LifecycleError, match="peer died"):
        token.check()


def test_a_cancelled_token_always_has_its_reason():
    for _ in range(200):
        token = CancelToken()
        thread = threading.Thread(target=token.cancel, args=("why",))
        thread.start()
        while not token.cancelled:
            pass
        with pytest.raises(LifecycleError, match="why"):
            token.check()
        thread.join()
