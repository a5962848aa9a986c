"""The publish state machine, exhaustively: all reachable states times all events."""

from collections import deque
from itertools import product

import pytest

from rl_core.errors import LifecycleError, StaleVersionError
from rl_core.publish import (
    Action,
    Begin,
    Commit,
    Failed,
    Outdated,
    Phase,
    Received,
    Rejoined,
    ReplicaState,
    Verified,
    advance,
)
from rl_core.versions import PolicyVersion

V = [PolicyVersion(1, 0), PolicyVersion(1, 1), PolicyVersion(2, 0), PolicyVersion(2, 1)]
ATTEMPTS = 3
"""States of later attempts are reached and checked, but not followed any further."""

EVENTS = [
    *[Begin(version) for version in V],
    *[
        kind(version, attempt)
        for kind, version, attempt in product(
            (Received, Verified, Commit), V, (None, *range(1, ATTEMPTS + 1))
        )
    ],
    Outdated(),
    Failed("a cause"),
    Failed("another"),
    Rejoined(),
]


def step(state, event):
    """The next state and actions, or None if the event is refused."""
    try:
        return advance(state, event)
    except (LifecycleError, StaleVersionError):
        return None


def explore(start, followers):
    """Everything reachable from `start`."""
    seen, todo = {start}, deque([start])
    while todo:
        for following in followers(todo.popleft()):
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return seen


def followers(state):
    if state.attempt > ATTEMPTS:
        return
    for event in EVENTS:
        result = step(state, event)
        if result is not None:
            yield result[0]


STATES = explore(ReplicaState(), followers)
TRANSITIONS = [
    (state, event, *result)
    for state in STATES
    for event in EVENTS
    if (result := step(state, event)) is not None
]


def test_the_check_is_not_vacuous():
    assert {state.phase for state in STATES} == set(Phase)
    assert len(STATES) > 150
    assert len(TRANSITIONS) > 700
    assert {type(event) for _, event, _, _ in TRANSITIONS} == {type(event) for event in EVENTS}


def test_committed_never_goes_back():
    for before, event, after, _ in TRANSITIONS:
        if before.committed is not None:
            assert after.committed is not None, (before, event)
            assert after.committed >= before.committed, (before, event)


def test_committed_changes_only_by_commit():
    for before, event, after, _ in TRANSITIONS:
        if after.committed != before.committed:
            assert isinstance(event, Commit)
            assert event.version == after.committed == before.target


def test_serving_begins_only_with_the_commit_of_what_was_verified():
    for before, event, after, _ in TRANSITIONS:
        if after.serving:
            assert isinstance(event, Commit)
            assert before.phase is Phase.VERIFIED
            assert before.target == event.version == after.committed
            assert event.attempt in (None, before.attempt)


def test_failed_always_fences_with_the_first_cause():
    for state in STATES:
        after, actions = advance(state, Failed("a new cause"))
        assert after.phase is Phase.FENCED
        assert not after.serving
        assert Action.CLOSE_GATE in actions
        expected = state.reason if state.phase is Phase.FENCED else "a new cause"
        assert after.reason == expected


def test_a_reason_is_kept_only_while_fenced():
    for state in STATES:
        assert bool(state.reason) == (state.phase is Phase.FENCED)


def test_the_gate_is_open_exactly_while_serving():
    for before, event, after, actions in TRANSITIONS:
        if after.serving:
            assert actions == (Action.FLUSH_KV, Action.OPEN_GATE), event
        else:
            assert Action.OPEN_GATE not in actions
            assert not before.serving or Action.CLOSE_GATE in actions


def test_a_target_exists_exactly_during_an_update():
    during = {Phase.RECEIVING, Phase.LOADED, Phase.VERIFIED}
    for state in STATES:
        assert (state.target is not None) == (state.phase in during)


def test_begin_is_refused_for_old_versions_and_during_an_update():
    for state, version in product(STATES, V):
        result = step(state, Begin(version))
        repair = state.phase in {Phase.FENCED, Phase.JOINING} and version == state.committed
        newer = state.committed is None or version > state.committed
        busy = state.phase in {Phase.RECEIVING, Phase.LOADED, Phase.VERIFIED}
        assert (result is not None) == ((newer or repair) and not busy), (state, version)


def test_every_fenced_replica_can_be_repaired():
    for state in STATES:
        fenced, _ = advance(state, Failed("broken"))
        version = state.committed or V[0]
        for event in (Begin(version), Received(version), Verified(version), Commit(version)):
            fenced, actions = advance(fenced, event)
        assert fenced.serving
        assert fenced.committed == version
        assert actions == (Action.FLUSH_KV, Action.OPEN_GATE)


def test_every_begin_is_a_new_attempt():
    for before, event, after, _ in TRANSITIONS:
        assert after.attempt == before.attempt + isinstance(event, Begin)


def test_a_refused_event_leaves_the_state_unchanged():
    for state in STATES:
        copy = ReplicaState(state.phase, state.committed, state.target, state.reason, state.attempt)
        for event in EVENTS:
            if step(state, event) is None:
                assert state == copy


def test_serving_needs_the_four_events_of_one_attempt_in_order():
    """Walks states together with what really happened since the last Begin."""
    order = (Begin, Received, Verified, Commit)

    def walk(node):
        state, history = node
        if state.attempt > ATTEMPTS:
            return
        for event in EVENTS:
            result = step(state, event)
            if result is None:
                continue
            after = result[0]
            done = (type(event), getattr(event, "version", None))
            new = (done,) if isinstance(event, Begin) else (*history, done)
            new = new if isinstance(event, order) else ()
            if after.serving:
                assert [kind for kind, _ in new] == list(order), new
                assert {version for _, version in new} == {after.committed}
            yield after, new

    explore((ReplicaState(), ()), walk)


def test_no_network_can_make_a_replica_serve_something_else():
    """Numbered messages, each lost, doubled, delayed or reordered at will.

    The engine's contents are tracked beside the state: broken by every Begin, whole once the
    attempt's load is complete. Messages of an attempt exist from then on, and for ever: any of
    them may arrive at any time, any number of times.
    """
    versions = V[:3]

    def walk(node):
        state, contents, loaded = node
        if state.attempt > ATTEMPTS:
            return
        sent = [
            kind(version, attempt)
            for version, attempt in loaded
            for kind in (Received, Verified, Commit)
        ]
        begins = [Begin(version) for version in versions]
        for event in [*begins, *sent, Failed("a cause"), Outdated(), Rejoined()]:
            result = step(state, event)
            if result is None:
                continue
            after = result[0]
            broken = isinstance(event, Begin | Failed | Rejoined)
            holds = None if broken else contents
            assert not after.serving or holds == after.committed, (state, event, contents)
            yield after, holds, loaded
        if state.target is not None and state.phase is Phase.RECEIVING:
            yield state, state.target, loaded | {(state.target, state.attempt)}

    nodes = explore((ReplicaState(), None, frozenset()), walk)
    assert any(state.serving and state.attempt == ATTEMPTS for state, _, _ in nodes)


def test_a_late_message_of_an_earlier_attempt_is_refused():
    state, _ = advance(ReplicaState(), Begin(V[0]))
    state, _ = advance(state, Failed("timed out"))
    state, _ = advance(state, Begin(V[0]))
    with pytest.raises(StaleVersionError, match="attempt 1, under way is 2"):
        advance(state, Received(V[0], 1))
    assert advance(state, Received(V[0], 2))[0].phase is Phase.LOADED


@pytest.mark.parametrize(
    ("event", "error", "text"),
    [
        (Begin(V[0]), StaleVersionError, "e1.s0 is refused: e1.s1 was already committed"),
        (Begin(V[1]), StaleVersionError, "e1.s1"),
        (Received(V[1]), LifecycleError, "Received is refused: the replica is committed"),
        (Rejoined(), LifecycleError, "not fenced"),
    ],
)
def test_messages_say_what_was_refused_and_why(event, error, text):
    state = ReplicaState(Phase.COMMITTED, V[1])
    with pytest.raises(error, match=text):
        advance(state, event)
