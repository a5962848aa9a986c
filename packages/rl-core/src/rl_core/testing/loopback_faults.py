"""Damage to the loopback transport, for the contract; hooks of `FaultHook`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.testing.segment_faults import on_segment

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rl_core.interfaces import CheckpointEngine
    from rl_core.transfer.plan import Segment


def corrupt(engine: CheckpointEngine, tensor: str) -> None:
    """A byte of the segment is flipped on the way."""
    on_segment(
        engine, tensor, lambda start, segment, data: start(segment, _flipped(data, segment, tensor))
    )


def truncate(engine: CheckpointEngine, tensor: str) -> None:
    """Half of the segment is put into the queues."""

    def half(start: Callable[..., None], segment: Segment, data: torch.Tensor) -> None:
        for line in start.__self__._lines:  # type: ignore[attr-defined]
            line.put(data[: len(data) // 2].clone())

    on_segment(engine, tensor, half)


def lose(engine: CheckpointEngine, tensor: str) -> None:
    """Neither the segment nor anything after it is put into the queues."""

    def silence(start: Callable[..., None], segment: Segment, data: torch.Tensor) -> None:
        del segment, data
        start.__self__._lines = []  # type: ignore[attr-defined]

    on_segment(engine, tensor, silence)


def _flipped(data: torch.Tensor, segment: Segment, tensor: str) -> torch.Tensor:
    changed = data.clone()
    slot = next(part.slot for part in segment.parts if part.meta.name == tensor)
    changed[slot.offset - segment.offset] ^= 1
    return changed
