"""One rank's end of a checkpoint engine, as workers of both sides hold it."""

from collections.abc import Mapping
from typing import Any

from rl_core import plugins
from rl_core.deadlines import CancelToken, Deadline
from rl_core.errors import LifecycleError
from rl_core.interfaces import CheckpointEngine, Endpoint, Place, TransferRole


class TransferMember:
    """Mixed into workers: builds the checkpoint engine and takes it through a sync."""

    _transfer: CheckpointEngine | None = None
    _rank: int = 0

    @property
    def transfer(self) -> CheckpointEngine:
        """The checkpoint engine, after `init_transfer`."""
        if self._transfer is None:
            raise LifecycleError("init_transfer was not called")
        return self._transfer

    def init_transfer(self, backend: str, options: Mapping[str, Any], role: TransferRole) -> None:
        """Create the checkpoint engine; it opens nothing yet."""
        entry, config = plugins.load_configured(
            plugins.CHECKPOINT_ENGINES, backend, options, "checkpoint_engine.options"
        )
        self._transfer = plugins.load_object(entry.engine)(config, role)
        self._rank = role.rank

    def prepare_transfer(self) -> Endpoint:
        """Open what the other ranks will connect to."""
        return self.transfer.prepare()

    def connect_transfer(self, place: Place, seconds: float) -> None:
        """Connect to the other ranks. Collective over both sides."""
        self.transfer.build_process_group(place, Deadline.after(seconds))

    def finalize_transfer(self, success: bool) -> None:
        """Close the sync."""
        self.transfer.finalize(success)

    def close_transfer(self) -> None:
        """Give everything back. Idempotent."""
        if self._transfer is not None:
            self._transfer.shutdown()
            self._transfer = None


def never() -> CancelToken:
    """A token that nobody cancels: the app ends transfers by their deadlines."""
    return CancelToken()
