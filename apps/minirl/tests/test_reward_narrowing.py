"""The search for the sample at fault, with functions and clocks that are made up."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minirl.reward_narrowing import Failure, FaultSearch

HANGS = 1e9


class Function:
    """Takes so many seconds for each sample, and counts those that have gone by."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.now = 0.0

    def attempt(self, samples, limit_s):
        took = min(limit_s, sum(self.seconds[at] for at in samples))
        self.now += took
        if took == limit_s:
            return Failure("hung", "hung"), took
        return [1.0] * len(samples), took

    def search(self, timeout_s):
        assert sum(self.seconds) > timeout_s
        search = FaultSearch(self.attempt, timeout_s, lambda: self.now)
        found = search.find(range(len(self.seconds)), "hung")
        assert self.now <= search.longest_s
        return found


def slow(count, seconds, **at):
    return [at.get(f"at_{number}", seconds) for number in range(count)]


@pytest.mark.parametrize("at", [0, 77, 127, 128, 200, 255])
def test_a_slow_function_that_hangs_on_one_sample(at):
    """Every quarter of these takes as long as what hangs is given at first."""
    found = Function(slow(256, 0.03, **{f"at_{at}": HANGS})).search(12)
    assert found == ([at], "")


def test_a_sample_that_is_slow_is_not_the_one_that_hangs():
    function = Function(slow(256, 0.001, at_10=9.0, at_200=HANGS))
    assert function.search(60) == ([200], "")


def test_one_of_several_is_named():
    samples, note = Function(slow(64, 0.01, at_20=HANGS, at_21=HANGS, at_60=HANGS)).search(60)
    assert (samples, note) == ([20], "")


def test_a_batch_that_is_too_slow_as_a_whole_has_nobody_at_fault():
    samples, note = Function(slow(64, 0.2)).search(12)
    assert samples == range(64)
    assert "in smaller parts all of them return in time" in note


def test_what_was_cleared_until_the_time_is_up_is_not_named():
    samples, note = Function(slow(256, 1.0, at_255=HANGS)).search(12)
    assert 255 in samples
    assert 1 < len(samples) < 256
    assert "not found out" in note


@given(
    st.lists(st.floats(0, 3) | st.just(HANGS), min_size=2, max_size=40),
    st.floats(0.1, 60),
)
def test_no_innocent_sample_is_named_alone(seconds, timeout_s):
    assume(sum(seconds) > timeout_s)
    samples, note = Function(seconds).search(timeout_s)
    if not note:
        (at,) = samples
        assert seconds[at] >= timeout_s
    elif HANGS in seconds:
        assert HANGS in [seconds[at] for at in samples]


@given(st.lists(st.floats(0, 0.1), min_size=2, max_size=300), st.data())
def test_one_that_hangs_among_quick_ones_is_always_found(seconds, data):
    at = data.draw(st.integers(0, len(seconds) - 1))
    seconds[at] = HANGS
    assert Function(seconds).search(60) == ([at], "")
