"""The fused sync: each actor rank streams into the engine rank on its own device."""

import logging
from typing import TYPE_CHECKING

from minirl.rollout_manager import RolloutManager
from minirl.sync_record import Clock, Moved, Order
from minirl.sync_settings import SyncSettings
from minirl.weight_sync import WeightSync
from minirl.worker_group import WorkerGroup
from rl_core.logs import kv
from rl_core.versions import VersionStore

if TYPE_CHECKING:
    from minirl.live_member import Expected
    from rl_core.interfaces import LoadReport

_logger = logging.getLogger(__name__)

KV_CACHE = "kv_cache"
WEIGHTS = "weights"
_ANSWER_S = 10.0


class FusedWeightSync(WeightSync):
    """Frees the engines' memory for training, and fills it again from the actor beside it."""

    def __init__(
        self,
        workers: WorkerGroup,
        rollout: RolloutManager,
        versions: VersionStore,
        settings: SyncSettings,
    ) -> None:
        super().__init__(rollout, versions, settings)
        self._workers = workers
        self._released = False

    def release(self) -> None:
        """Hand the engines' memory to the actor; the replicas answer nothing until `sync`."""
        self._release("Rollout memory released for training:")

    def transfer(self, order: Order, clock: Clock) -> Moved:
        """Release if that was not done yet, get weights memory back, load, get KV memory back."""
        with clock.phase("release"):
            self._release(
                f"Fused weight sync: release rollout memory before sync_index={order.index},"
            )
        with clock.phase("resume"):
            self._resume(WEIGHTS, order.index)
        with clock.phase("transfer"):
            moved = self._stream(order)
        with clock.phase("resume"):
            self._resume(KV_CACHE, order.index)
        self._released = False
        return moved

    def close(self, clock: Clock, *, success: bool) -> None:
        """Nothing: a stream ends by itself."""

    def _release(self, said: str) -> None:
        if self.settings.free_cache_engine and not self._released:
            freed = self.rollout.release((KV_CACHE, WEIGHTS), self.settings.timeout_s)
            self._released = True
            nbytes = {f"freed_{tag}_bytes": nbytes for tag, nbytes in freed.items()}
            _logger.info("%s %s", said, kv(**nbytes))

    def _resume(self, tag: str, index: int) -> None:
        if self._released:
            self.rollout.resume((tag,), self.settings.timeout_s)
            if tag == WEIGHTS:
                _logger.info("Fused weight sync: resume rollout weights for sync_index=%d", index)

    def _stream(self, order: Order) -> Moved:
        settings = self.settings
        answers: list[tuple[LoadReport | None, Expected]] = self._workers.call(
            "sync_weights",
            order.version,
            settings.run_id,
            settings.timeout_s,
            settings.verify_light,
            order.live,
            timeout_s=settings.timeout_s + _ANSWER_S,
        )
        reports = [report for report, _ in answers if report is not None]
        return Moved(reports, [expected for _, expected in answers])
