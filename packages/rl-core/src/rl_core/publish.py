"""The publish state machine: when may a replica answer requests?

Pure: `advance(state, event)` gives the next state and the actions to carry out, or raises and
leaves everything as it was. `rl_core.gate` and the managers execute the actions.

```
            Begin           Received         Verified          Commit
 JOINING ──────────► RECEIVING ──────► LOADED ──────► VERIFIED ──────► COMMITTED (serves)
 STALE ────────────►     ▲                                            │        │
    ▲                    └──────────────── Begin (newer version) ─────┘        │
    └───────────────────────────── Outdated ───────────────────────────────────┘
 any ── Failed ──► FENCED ── Begin (not older than the last commit) ──► RECEIVING
                      └────── Rejoined (a restarted engine) ──► JOINING
```

Only COMMITTED serves. It is reached only by the four events of one version in their order, so a
replica never serves a mixture of versions, nor one that was not verified (where verification is
off, the manager says so by sending Verified right away).

A version may be tried again after a failure, and a message of the first try may arrive during the
second. Each Begin therefore starts a new *attempt*, numbered by the replica; an event that came
over a network carries the number, and is refused in any other attempt. An event that the state's
owner raises itself, in the call that did the work, may leave it out.
"""

from enum import StrEnum
from typing import TypeAlias

import msgspec

from rl_core.errors import LifecycleError, StaleVersionError
from rl_core.versions import PolicyVersion


class Phase(StrEnum):
    """What a replica is doing; only COMMITTED answers requests."""

    JOINING = "joining"
    STALE = "stale"
    RECEIVING = "receiving"
    LOADED = "loaded"
    VERIFIED = "verified"
    COMMITTED = "committed"
    FENCED = "fenced"


class Action(StrEnum):
    """What the owner of the state has to do, in the order given."""

    CLOSE_GATE = "close_gate"
    FLUSH_KV = "flush_kv"
    OPEN_GATE = "open_gate"


class ReplicaState(msgspec.Struct, frozen=True):
    """State of one replica.

    Attributes:
        phase: what it is doing.
        committed: the last version that it served, or None; never goes back.
        target: the version being loaded, or None.
        reason: why it is fenced; empty otherwise.
        attempt: number of Begins so far; the last one's number.
    """

    phase: Phase = Phase.JOINING
    committed: PolicyVersion | None = None
    target: PolicyVersion | None = None
    reason: str = ""
    attempt: int = 0

    @property
    def serving(self) -> bool:
        """Whether requests are answered."""
        return self.phase is Phase.COMMITTED


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Bytes of `version` are about to arrive."""

    version: PolicyVersion


class Received(msgspec.Struct, frozen=True, tag=True):
    """Every rank of the replica holds all of `version`."""

    version: PolicyVersion
    attempt: int | None = None


class Verified(msgspec.Struct, frozen=True, tag=True):
    """What the ranks hold was found to be `version`, or nobody asked for a check."""

    version: PolicyVersion
    attempt: int | None = None


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Serve `version` from now on."""

    version: PolicyVersion
    attempt: int | None = None


class Outdated(msgspec.Struct, frozen=True, tag=True):
    """The fleet serves something newer; stop answering until synced."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Something went wrong; answer nothing. A replica that is fenced already keeps its reason."""

    reason: str


class Rejoined(msgspec.Struct, frozen=True, tag=True):
    """The engine was restarted and holds no weights."""


Event: TypeAlias = Begin | Received | Verified | Commit | Outdated | Failed | Rejoined
Step: TypeAlias = tuple[ReplicaState, tuple[Action, ...]]

_ADVANCE: dict[type, tuple[Phase, Phase]] = {
    Received: (Phase.RECEIVING, Phase.LOADED),
    Verified: (Phase.LOADED, Phase.VERIFIED),
    Commit: (Phase.VERIFIED, Phase.COMMITTED),
}
_BEGINS = (Phase.JOINING, Phase.STALE, Phase.COMMITTED, Phase.FENCED)


def advance(state: ReplicaState, event: Event) -> Step:
    """The next state and what to do.

    Errors: StaleVersionError for a version that is old, repeated or not the one under way;
    LifecycleError for an event that the phase does not allow. The state is then unchanged.
    """
    match event:
        case Failed(reason):
            # Of several failures the first is the cause, the others follow from it.
            cause = state.reason if state.phase is Phase.FENCED else reason
            return _moved(state, Phase.FENCED, reason=cause), (Action.CLOSE_GATE,)
        case Begin(version):
            return _begin(state, version)
        case Outdated():
            _require(state, event, Phase.COMMITTED)
            return _moved(state, Phase.STALE), (Action.CLOSE_GATE,)
        case Rejoined():
            _require(state, event, Phase.FENCED)
            return _moved(state, Phase.JOINING), ()
        case _:
            return _proceed(state, event)


def _begin(state: ReplicaState, version: PolicyVersion) -> Step:
    _require(state, Begin(version), *_BEGINS)
    if state.committed is not None:
        repair = state.phase in (Phase.FENCED, Phase.JOINING) and version == state.committed
        if version <= state.committed and not repair:
            msg = f"version {version} is refused: {state.committed} was already committed"
            raise StaleVersionError(msg)
    begun = ReplicaState(Phase.RECEIVING, state.committed, version, attempt=state.attempt + 1)
    return begun, (Action.CLOSE_GATE,)


def _proceed(state: ReplicaState, event: Received | Verified | Commit) -> Step:
    source, target = _ADVANCE[type(event)]
    _require(state, event, source)
    if event.version != state.target:
        msg = f"{_name(event)} of {event.version} is refused: {state.target} is under way"
        raise StaleVersionError(msg)
    if event.attempt not in (None, state.attempt):
        msg = (
            f"{_name(event)} of {event.version} is refused: it belongs to attempt "
            f"{event.attempt}, under way is {state.attempt}"
        )
        raise StaleVersionError(msg)
    if target is Phase.COMMITTED:
        served = ReplicaState(Phase.COMMITTED, event.version, attempt=state.attempt)
        return served, (Action.FLUSH_KV, Action.OPEN_GATE)
    return ReplicaState(target, state.committed, event.version, attempt=state.attempt), ()


def _moved(state: ReplicaState, phase: Phase, reason: str = "") -> ReplicaState:
    """`state` in a phase without a version under way."""
    return ReplicaState(phase, state.committed, None, reason, state.attempt)


def _require(state: ReplicaState, event: Event, *phases: Phase) -> None:
    if state.phase not in phases:
        expected = " or ".join(phases)
        reason = f" ({state.reason})" if state.reason else ""
        msg = f"{_name(event)} is refused: the replica is {state.phase}{reason}, not {expected}"
        raise LifecycleError(msg)


def _name(event: Event) -> str:
    return type(event).__name__
