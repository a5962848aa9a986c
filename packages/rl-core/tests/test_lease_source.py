import contextlib

import pytest

from rl_core.errors import LifecycleError
from rl_core.rollout.lease_source import LeaseSource, SourceFailedError


def stream(taken, *, broken=False):
    """Three leases that note who was taken; then perhaps an error."""
    for number in range(3):
        taken.append(number)
        yield contextlib.nullcontext(number)
    if broken:
        raise LifecycleError("the consumer failed in a lease")


def test_what_was_not_read_is_read():
    taken = []
    source = LeaseSource(stream(taken))
    next(source)
    source.drain(failed=False)
    assert taken == [0, 1, 2]


def test_an_error_of_the_stream_counts_unless_it_would_hide_another():
    with pytest.raises(LifecycleError):
        LeaseSource(stream([], broken=True)).drain(failed=False)
    taken = []
    LeaseSource(stream(taken, broken=True)).drain(failed=True)
    assert taken == [0, 1, 2]


def test_the_source_is_told_apart_from_its_consumer():
    source = LeaseSource(stream([], broken=True))
    with pytest.raises(SourceFailedError) as caught:
        list(source)
    assert isinstance(caught.value.cause, LifecycleError)
