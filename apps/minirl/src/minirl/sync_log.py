"""What the business log tells of a weight sync."""

import logging

from minirl.sync_record import SyncRecord
from rl_core.logs import kv

_logger = logging.getLogger(__name__)

_GIGA = 1e9


def tell_started(
    record: SyncRecord, mode: str, rollout: str, *, light: bool, live: bool, due: bool
) -> None:
    """One line.

    Args:
        record: of the sync.
        mode: fused or separate.
        rollout: name of the rollout backend.
        light: whether digests travel with the tensors.
        live: whether live verification is on.
        due: and whether this sync is one of those that are verified.
    """
    skipped = {"configured_verify_live_weights": True} if live and not due else {}
    _logger.info(
        "Weight sync started: %s",
        kv(
            sync_index=record.sync_index,
            phase=record.phase,
            mode=mode,
            rollout_backend=rollout,
            checkpoint_engine=record.backend,
            version=record.version,
            verify_light_transfer=light,
            verify_live_weights=live and due,
            **skipped,
        ),
    )


def tell_finished(record: SyncRecord) -> None:
    """One line, with the speed."""
    _logger.info(
        "Weight sync finished: %s",
        kv(
            sync_index=record.sync_index,
            phase=record.phase,
            version=record.version,
            payload_bytes=record.payload_bytes,
            seconds=record.seconds,
            gb_per_s=record.payload_bytes / record.seconds / _GIGA,
        ),
    )
