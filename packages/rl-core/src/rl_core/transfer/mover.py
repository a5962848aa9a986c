"""What moves one version among the members of a group that `GroupEngine` holds together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.interfaces import Place, TensorStream, TransferReport
    from rl_core.metadata import Manifest
    from rl_core.transfer.lending import Lending
    from rl_core.transfer.link import Link
    from rl_core.transfer.peers import Peers
    from rl_core.transfer.watch import Watch


class Mover(ABC):
    """One instance in each engine, kept over syncs. All waits look at the `Watch` they get."""

    def properties(self) -> dict[str, str]:
        """What belongs into this rank's `Endpoint`."""
        return {}

    def offer(self, place: Place, watch: Watch) -> dict[str, str]:
        """Sender: prepare a new group; what members need to connect."""
        del place, watch
        return {}

    def join(self, place: Place, properties: Mapping[str, str], watch: Watch) -> None:
        """All: connect to a group that the sender offered. Collective."""
        del place, properties, watch

    def leave(self) -> None:
        """Give up the group at once, also with bytes under way. Idempotent; never raises."""
        return

    @abstractmethod
    def send(
        self, weights: TensorStream, manifest: Manifest, peers: Peers, watch: Watch
    ) -> TransferReport:
        """Sender 0: move one version; returns when every receiver has read everything."""

    @abstractmethod
    def receive(self, manifest: Manifest, link: Link, watch: Watch) -> Lending:
        """Receivers: take one version."""

    def conclude(self, *, success: bool) -> None:
        """The sync is over for its caller, too, after whatever became of the weights; never raises.

        Args:
            success: whether they were moved, and the caller says that the version counts.
        """
        del success

    @abstractmethod
    def close(self) -> None:
        """Give back everything. Idempotent."""
