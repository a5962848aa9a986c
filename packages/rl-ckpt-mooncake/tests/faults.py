"""Damage to the chain of one engine, for the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_ckpt_mooncake import outlet as outlet_module

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rl_ckpt_mooncake.inlet import ChainInlet
    from rl_ckpt_mooncake.outlet import ChainOutlet
    from rl_core.interfaces import CheckpointEngine
    from rl_core.transfer.plan import Part


def corrupt(engine: CheckpointEngine, tensor: str) -> None:
    """A receiver's bucket has a flipped byte in `tensor`, after it was read."""
    make = engine._mover._transport.inlet

    def inlet(plan, properties, watch):
        made: ChainInlet = make(plan, properties, watch)
        verify = made._verify

        def damaged(bucket: int, piece, buffer: torch.Tensor) -> None:
            for number in piece.parts:
                part = made._pieces.parts[bucket][number]
                if part.meta.name == tensor:
                    buffer[part.slot.offset + part.slot.nbytes - 1] ^= 1
            verify(bucket, piece, buffer)

        made._verify = damaged
        return made

    engine._mover._transport.inlet = inlet


def truncate(engine: CheckpointEngine, tensor: str) -> None:
    """The sender copies half of `tensor` into the bucket."""

    def cut(place: Callable[..., None], part: Part, buffer: torch.Tensor, data: torch.Tensor):
        copy = outlet_module.copy_part

        def half(target, source, kind, progress):
            before = target[len(target) // 2 :].clone()
            digest = copy(target, source, kind, progress)
            target[len(target) // 2 :] = before
            return digest

        outlet_module.copy_part = half
        try:
            place(part, buffer, data)
        finally:
            outlet_module.copy_part = copy

    _on_part(engine, tensor, cut)


def lose(engine: CheckpointEngine, tensor: str) -> None:
    """The sender never announces the piece in which `tensor` ends, nor any after it."""

    def silence(place: Callable[..., None], part: Part, buffer: torch.Tensor, data: torch.Tensor):
        outlet: ChainOutlet = place.__self__
        outlet._announce = lambda bucket, filled: None
        place(part, buffer, data)

    _on_part(engine, tensor, silence)


def _on_part(engine: CheckpointEngine, tensor: str, damage: Callable[..., None]) -> None:
    make = engine._mover._transport.outlet

    def outlet(plan, watch):
        made: ChainOutlet = make(plan, watch)
        place = made._place

        def damaged(part: Part, buffer: torch.Tensor, data: torch.Tensor) -> None:
            if part.meta.name == tensor:
                damage(place, part, buffer, data)
            else:
                place(part, buffer, data)

        made._place = damaged
        return made

    engine._mover._transport.outlet = outlet
