"""Damage where a sender packs a tensor or hands it to its transport, for hooks of `FaultHook`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_core.transfer.packing import Packer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rl_core.interfaces import CheckpointEngine
    from rl_core.transfer.plan import Part, Segment


def on_segment(engine: Any, tensor: str, damage: Callable[..., None]) -> None:
    """Let `damage(start, segment, data)` stand for `Outlet.start` of what carries `tensor`.

    Args:
        engine: of the sender; one whose transport is a `rl_core.transfer.transport.Transport`.
        tensor: name of the tensor.
        damage: gets the transport's own `start`, which it may call otherwise or not at all.
    """
    make = engine._mover._transport.outlet

    def outlet(plan: Any, watch: Any) -> Any:
        made = make(plan, watch)
        start = made.start

        def damaged(segment: Segment, data: torch.Tensor) -> None:
            if any(part.meta.name == tensor for part in segment.parts):
                damage(start, segment, data)
            else:
                start(segment, data)

        made.start = damaged
        return made

    engine._mover._transport.outlet = outlet


def miscopy(_: CheckpointEngine, tensor: str) -> None:
    """A byte of `tensor` is another one when it is packed next; the tensor itself is as it was."""
    take = Packer._bytes_of

    def damaged(packer: Packer, part: Part) -> torch.Tensor:
        take(packer, part)
        if part.meta.name == tensor and packer._data is not None:
            Packer._bytes_of = take  # type: ignore[method-assign]
            packer._data = packer._data.clone()
            packer._data[part.slot.start] ^= 1
        return take(packer, part)

    Packer._bytes_of = damaged  # type: ignore[assignment,method-assign]
