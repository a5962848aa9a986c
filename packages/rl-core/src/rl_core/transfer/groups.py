"""The members of a transfer group: topology and name."""

from collections.abc import Sequence

import msgspec
import xxhash

from rl_core.errors import ConfigError
from rl_core.interfaces import Endpoint, Place

SENDER = "sender"
RECEIVER = "receiver"


def star(senders: Sequence[Endpoint], receivers: Sequence[Endpoint]) -> dict[str, list[Place]]:
    """Places by role, in rank order: sender 0 is rank 0 of the group, receivers follow.

    Further senders hold the same weights (each gathers every full tensor); they get rank -1, take
    no part in the bytes and drain their streams. The predecessor of a receiver is the rank before
    it, for transports that relay.

    Args:
        senders: endpoints of the actor ranks, in rank order.
        receivers: endpoints of the rollout ranks, in rank order.
    """
    if not senders or not receivers:
        raise ConfigError(
            f"a transfer needs a sender and a receiver: {len(senders)} and {len(receivers)} given"
        )
    _check_ranks(senders, SENDER)
    _check_ranks(receivers, RECEIVER)
    members = (senders[0], *receivers)
    size = len(members)
    return {
        SENDER: [
            Place(rank=0 if number == 0 else -1, world_size=size, endpoints=members)
            for number in range(len(senders))
        ],
        RECEIVER: [
            Place(rank=rank, world_size=size, endpoints=members, predecessor=rank - 1)
            for rank in range(1, size)
        ],
    }


def group_name(run_id: str, place: Place) -> str:
    """A name that only those share who were given the same members in the same run."""
    members = msgspec.msgpack.encode((run_id, place.endpoints))
    return f"group-{xxhash.xxh3_128_hexdigest(members)}"


def _check_ranks(endpoints: Sequence[Endpoint], role: str) -> None:
    found = [endpoint.rank for endpoint in endpoints]
    if any(endpoint.role != role for endpoint in endpoints) or sorted(set(found)) != found:
        listed = [f"{endpoint.role} {endpoint.rank}" for endpoint in endpoints]
        raise ConfigError(f"expected the {role}s in the order of their ranks, got {listed}")
