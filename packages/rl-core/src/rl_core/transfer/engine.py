"""A checkpoint engine that streams buckets over any `Transport`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.transfer.group_engine import GroupEngine, check_role
from rl_core.transfer.mover import Mover
from rl_core.transfer.reception import Reception
from rl_core.transfer.sending import Sending
from rl_core.transfer.unpacking import JoinBuffer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.interfaces import Place, TensorStream, TransferReport, TransferRole
    from rl_core.metadata import Manifest
    from rl_core.transfer.link import Link
    from rl_core.transfer.peers import Peers
    from rl_core.transfer.transport import Transport
    from rl_core.transfer.watch import Watch

__all__ = ["StreamingEngine", "check_role"]


class StreamingEngine(GroupEngine):
    """Sender 0 streams buckets to every receiver over a `Transport`."""

    def __init__(self, role: TransferRole, transport: Transport) -> None:
        super().__init__(role, _BucketMover(role, transport))


class _BucketMover(Mover):
    """Packs, announces and unpacks buckets; the transport moves them."""

    def __init__(self, role: TransferRole, transport: Transport) -> None:
        self._role = role
        self._transport = transport
        self._join = JoinBuffer()

    def properties(self) -> dict[str, str]:
        return self._transport.properties()

    def offer(self, place: Place, watch: Watch) -> dict[str, str]:
        return self._transport.offer(place, watch)

    def join(self, place: Place, properties: Mapping[str, str], watch: Watch) -> None:
        self._transport.join(place, properties, watch)

    def leave(self) -> None:
        self._transport.leave()

    def send(
        self, weights: TensorStream, manifest: Manifest, peers: Peers, watch: Watch
    ) -> TransferReport:
        return Sending(self._role, peers, self._transport, watch).run(weights, manifest)

    def receive(self, manifest: Manifest, link: Link, watch: Watch) -> Reception:
        kind = self._role.digest_kind
        return Reception(manifest, kind, link, self._transport, self._join, watch)

    def close(self) -> None:
        self._transport.close()
        self._join.fit(0)
