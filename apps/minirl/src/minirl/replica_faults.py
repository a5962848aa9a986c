"""Which replica is at fault when a sync fails: found from what was said, never guessed."""

from collections.abc import Iterable, Sequence

from minirl.ray_launcher import MemberDiedError
from minirl.worker_calls import Witness
from rl_core.errors import MiniRLError, TransferError, in_one_line

SENDERS = "actor"
"""Role of the workers that send; all others receive."""
RECEIVER = "receiver"
"""How errors name the rollout ranks of a transfer; `REPLICA` a whole replica."""
REPLICA = "replica"


def replica_name(replica: int) -> str:
    """A replica as the origin of an error."""
    return f"{REPLICA} {replica}"


def receiver_name(rank: int) -> str:
    """A rollout rank as the origin of an error."""
    return f"{RECEIVER} {rank}"


def faults_of(error: Exception, tp_size: int) -> dict[int, str]:
    """The replica that an error has as its origin, and what it says; empty without one."""
    origin = error.origin if isinstance(error, MiniRLError) else ""
    role, _, number = origin.partition(" ")
    if role == REPLICA:
        return {int(number): _told(error)}
    if role == RECEIVER:
        return {int(number) // tp_size: _told(error)}
    return {}


def faults_in_transfer(witnesses: Sequence[Witness], tp_size: int) -> dict[int, str]:
    """Replicas that the members of a failed transfer show to be at fault, and why.

    A death of a receiver tells everything. Else a receiver that failed by itself, or that somebody
    names as the origin, is at fault; trouble with the transfer itself blames nobody. What failed
    by itself at a sender is no replica's fault: then none is.
    """
    receivers = [said for said in witnesses if said.role != SENDERS]
    dead = [said for said in receivers if isinstance(said.error, MemberDiedError)]
    if dead:
        return silent(dead, tp_size)
    named: dict[int, str] = {}
    for said in witnesses:
        own = _by_itself(said.error)
        if own and said.role == SENDERS:
            return {}
        found = silent([said], tp_size) if own else faults_of(said.error, tp_size)
        named = found | named
    return named


def silent(receivers: Iterable[Witness], tp_size: int) -> dict[int, str]:
    """Replicas of receivers that did not do what every healthy one does, and what was said."""
    return {said.rank // tp_size: _told(said.error) for said in receivers}


def _by_itself(error: Exception) -> bool:
    """Whether it happened where it was raised; with an origin it may have been elsewhere."""
    if isinstance(error, MiniRLError) and error.origin:
        return False
    return isinstance(error, MemberDiedError) or not isinstance(error, TransferError)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {in_one_line(error)}"
