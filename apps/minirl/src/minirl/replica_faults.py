"""Which replica is at fault when a sync fails: found from what was said, never guessed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from minirl.ray_launcher import MemberDiedError
from minirl.worker_calls import Witness
from rl_core.errors import MiniRLError, RolloutError, TransferError, in_one_line

SENDERS = "actor"
"""Role of the workers that send; all others receive."""
RECEIVER = "receiver"
"""How errors name the rollout ranks of a transfer; `REPLICA` a whole replica."""
REPLICA = "replica"


def replica_name(replica: int) -> str:
    """A replica as the origin of an error."""
    return f"{REPLICA} {replica}"


@contextmanager
def naming(replica: int) -> Iterator[None]:
    """Say which replica failed in the block: its name is the error's origin."""
    name = replica_name(replica)
    try:
        yield
    except RolloutError as error:
        raise type(error)(f"{name}: {error}").blaming(name) from error
    except MiniRLError as error:
        error.blaming(name)
        raise


def receiver_name(rank: int) -> str:
    """A rollout rank as the origin of an error."""
    return f"{RECEIVER} {rank}"


def faults_of(error: Exception, tp_size: int) -> dict[int, str]:
    """The replica that an error has as its origin, and what it says; empty without one."""
    origin = error.origin if isinstance(error, MiniRLError) else ""
    role, _, number = origin.partition(" ")
    if role == REPLICA:
        return {int(number): told(error)}
    if role == RECEIVER:
        return {int(number) // tp_size: told(error)}
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
        return _all_of(dead, tp_size)
    named: dict[int, str] = {}
    for said in witnesses:
        own = _by_itself(said.error)
        if own and said.role == SENDERS:
            return {}
        found = _all_of([said], tp_size) if own else faults_of(said.error, tp_size)
        named = found | named
    return named


def faults_in_closing(said: Sequence[Witness], asked: int, tp_size: int) -> dict[int, str]:
    """Replicas of receivers that are dead, or do not close a transfer while others do, and why.

    Args:
        said: by members that did not close it: actors and receivers.
        asked: number of receivers that were to close it.
        tp_size: ranks of a replica.
    """
    receivers = [one for one in said if one.role != SENDERS]
    dead = [one for one in receivers if isinstance(one.error, MemberDiedError)]
    others_do = len(receivers) < asked or len(said) == asked == 1
    return _all_of(receivers if others_do else dead, tp_size)


def _all_of(receivers: Sequence[Witness], tp_size: int) -> dict[int, str]:
    return {said.rank // tp_size: told(said.error) for said in receivers}


def _by_itself(error: Exception) -> bool:
    """Whether it happened where it was raised; with an origin it may have been elsewhere."""
    if isinstance(error, MiniRLError) and error.origin:
        return False
    return isinstance(error, MemberDiedError) or not isinstance(error, TransferError)


def told(error: Exception) -> str:
    """An error as the reason why a replica is done without."""
    return f"{type(error).__name__}: {in_one_line(error)}"
