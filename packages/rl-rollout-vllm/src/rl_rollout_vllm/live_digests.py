"""Digests of what one vLLM rank really computes with, in the mode in which it serves.

Tensors that the engine computes with as they are, are digested as they are. What vLLM's CPU build
keeps in a kernel's own layout is put back into the plain one first, without loss:

* **expert stacks**: packing moves elements and changes none. Where each element goes is found by
  packing their numbers with the same operation; that every place is taken exactly once is checked,
  and so is that packing the plain stack again gives the live bytes. Hence one changed element of
  the packed stack is one changed element of the plain one.
* **packed linear layers** (`cpu_packed_weights`): the kernel's copy cannot be read, so the kernel
  is asked: its product with the unit matrix is the weight. Every sum has one term that is not zero,
  so that nothing is rounded; only the sign of a zero is lost, which no product shows either. A
  kernel that rounds shows up as a difference, never as a match.
"""

from collections.abc import Iterator
from functools import lru_cache

import msgspec
import torch
from torch import nn

from rl_core.errors import VerificationError
from rl_core.rollout.live_digests import Live, content_of, digests_of, flip_bit, tensors_of
from rl_core.torch import as_bytes
from rl_rollout_vllm import cpu_patches
from rl_rollout_vllm.layout import PACKED

STACKS = ("w13_weight", "w2_weight")
DIGIT = 128
"""Numbers of elements are packed digit by digit, in a base that every float dtype holds exactly."""

PROBE_ROWS = 512
"""Rows of the unit matrix that go through a packed kernel at a time."""


def live_tensors(model: nn.Module) -> Iterator[Live]:
    """Every tensor that the model computes with, in its plain layout, under every name it has."""
    for path, module in model.named_modules(remove_duplicate=False):
        isa = cpu_patches.packed_experts(module)
        linear = cpu_patches.packed_copy(module)
        if linear:
            yield Live(f"{path}.weight{PACKED}", _asked(module), derived=True)
        for name, tensor in tensors_of(module):
            if linear and name == "weight" and not tensor.numel():
                continue
            whole = f"{path}.{name}" if path else name
            if isa is not None and name in STACKS:
                yield Live(whole, _unpacked(whole, tensor, isa), derived=True)
            else:
                yield Live(whole, tensor)


def live_digests(model: nn.Module) -> dict[str, str]:
    """Their digests, by run-time name.

    Errors: VerificationError naming a tensor without memory, or one that cannot be unpacked.
    """
    return digests_of(live_tensors(model))


def live_content(model: nn.Module, name: str, start: int) -> bytes | None:
    """A piece of what `name` is computed with, in its plain layout: an encoded `LiveContent`.

    None if there is no such tensor: an error on one rank only would leave the others' answers to
    be taken for those to the next call.
    """
    found = content_of(live_tensors(model), name, start)
    return None if found is None else msgspec.msgpack.encode(found)


def flip(model: nn.Module, name: str, position: float) -> None:
    """Flip one bit of what `name` is computed with (tests only); as `flip_bit`."""
    for path, module in model.named_modules(remove_duplicate=False):
        if name == f"{path}.weight{PACKED}":
            weight = _asked(module)
            flip_bit(weight, position)
            cpu_patches.pack_again(module, weight)
            return
        for own, tensor in tensors_of(module):
            if name == f"{path}.{own}":
                flip_bit(tensor, position)
                return
    raise VerificationError(f"the engine has no tensor {name!r}")


def _asked(module: nn.Module) -> torch.Tensor:
    """The weight that a packed linear layer computes with, (outputs, inputs)."""
    width, dtype = cpu_patches.packed_width(module)
    found = []
    for start in range(0, width, PROBE_ROWS):
        unit = torch.eye(width, dtype=dtype)[start : start + PROBE_ROWS]
        found.append(module.cpu_linear(unit, module.weight, None))
    # Sums that start at 0.0 have no -0.0; kernels that start otherwise are made to agree.
    return torch.cat(found).t().contiguous() + 0.0


def _unpacked(name: str, stack: torch.Tensor, isa: str) -> torch.Tensor:
    """A packed stack of experts, (experts, outputs, inputs), as it was before."""
    places = _places(stack.shape[1], stack.shape[2], stack.dtype, isa)
    plain = torch.empty_like(stack)
    plain.view(len(stack), -1)[:, places] = stack.view(len(stack), -1)
    again = cpu_patches.pack_experts(plain, isa)
    if not torch.equal(as_bytes(again), as_bytes(stack)):
        raise VerificationError(f"{name!r} is not packed as vLLM packs for {isa!r}")
    return plain


@lru_cache(maxsize=8)
def _places(rows: int, columns: int, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """For each element of a packed expert, the number of the plain element that it is."""
    numbers = torch.arange(rows * columns)
    places = torch.zeros_like(numbers)
    factor = 1
    while factor < numbers.numel():
        digits = (numbers // factor % DIGIT).to(dtype).view(1, rows, columns)
        places += cpu_patches.pack_experts(digits, isa).view(-1).long() * factor
        factor *= DIGIT
    if not torch.equal(places.sort().values, numbers):
        raise VerificationError(f"packing for {isa!r} does more than move elements")
    return places
