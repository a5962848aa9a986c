"""Damage to the broadcasts of one engine, for the contract."""

import torch

from rl_ckpt_hccl.transport import BroadcastInlet
from rl_core.interfaces import CheckpointEngine
from rl_core.testing.segment_faults import on_segment
from rl_core.transfer.plan import TransferPlan


def corrupt(engine: CheckpointEngine, tensor: str) -> None:
    """A receiver's bucket has a flipped byte in `tensor`."""

    def wrap(inlet: BroadcastInlet, plan: TransferPlan) -> None:
        finish = inlet.finish

        def damaged(bucket: int) -> torch.Tensor:
            buffer = finish(bucket)
            for part in plan.buckets[bucket].parts:
                if part.meta.name == tensor:
                    buffer[part.slot.offset + part.slot.nbytes - 1] ^= 1
            return buffer

        inlet.finish = damaged

    make = engine._mover._transport.inlet

    def inlet(plan, properties, watch):
        made = make(plan, properties, watch)
        wrap(made, plan)
        return made

    engine._mover._transport.inlet = inlet


def truncate(engine: CheckpointEngine, tensor: str) -> None:
    """The sender's broadcast that carries `tensor` is shorter than announced."""
    on_segment(engine, tensor, lambda start, segment, data: start(segment, data[: len(data) // 2]))


def lose(engine: CheckpointEngine, tensor: str) -> None:
    """The sender's broadcast that carries `tensor` never begins."""
    on_segment(engine, tensor, lambda start, segment, data: None)
