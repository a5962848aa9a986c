"""Digests of what one SGLang rank really computes with, in the mode in which it serves.

Without AMX, SGLang on cpu computes with its parameters and buffers as they are, so what is digested
is what is read. Packed for AMX, or by a kernel for an accelerator, a parameter has another shape or
another order of elements than its row of the table says: that shows up as a difference, never as a
match.
"""

import msgspec
from torch import nn

from rl_core.errors import VerificationError
from rl_core.rollout.live_digests import content_of, digests_of, flip_bit, live_tensors


def live_digests(model: nn.Module) -> dict[str, str]:
    """Digests of every parameter, buffer and further tensor, by run-time name.

    Errors: VerificationError naming a tensor without memory.
    """
    return digests_of(live_tensors(model))


def live_content(model: nn.Module, name: str, start: int) -> bytes | None:
    """A piece of a live tensor: an encoded `LiveContent`; None if there is no such tensor."""
    found = content_of(live_tensors(model), name, start)
    return None if found is None else msgspec.msgpack.encode(found)


def flip(model: nn.Module, name: str, position: float) -> None:
    """Flip one bit of a live tensor (tests only); as `flip_bit`."""
    for live in live_tensors(model):
        if live.name == name:
            flip_bit(live.tensor, position)
            return
    raise VerificationError(f"the engine has no tensor {name!r}")
