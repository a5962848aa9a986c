"""Damage where a sender hands a segment to its transport, for hooks of `FaultHook`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rl_core.transfer.plan import Segment


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
