"""Digests of what a model really holds, computed where it is: in an engine's worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from rl_core.errors import VerificationError
from rl_core.interfaces import LiveContent
from rl_core.torch import WordSum, as_bytes, meta_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from torch import nn

KV_ATTRIBUTES = frozenset({"kv_cache"})
"""Attributes of attention layers that are no part of the weights."""


PIECE_BYTES = 1 << 24
"""Largest piece of a tensor that is shown at once."""


class Live(NamedTuple):
    """A tensor of a model.

    Attributes:
        name: run-time name.
        tensor: its content.
        derived: made for this look, so that its memory may be another tensor's in the next one.
    """

    name: str
    tensor: torch.Tensor
    derived: bool = False


def tensors_of(
    module: nn.Module, skip: Container[str] = KV_ATTRIBUTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters, buffers (persistent or not), and tensors in plain attributes."""
    held = (module._parameters, module._buffers, vars(module))
    for name, tensor in ((name, tensor) for items in held for name, tensor in items.items()):
        if isinstance(tensor, torch.Tensor) and name not in skip:
            yield name, tensor


def live_tensors(model: nn.Module) -> Iterator[Live]:
    """Every tensor of a model under every name that it has: a tied head is there twice."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in tensors_of(module):
            yield Live(f"{path}.{name}" if path else name, tensor)


def digests_of(tensors: Iterable[Live]) -> dict[str, str]:
    """`wsum64` digests by run-time name; storage that has several names is read once.

    Errors: VerificationError naming a tensor that has no storage to read.
    """
    sums: dict[tuple[object, ...], WordSum] = {}
    found = {}
    for name, tensor, derived in tensors:
        if tensor.is_meta or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise VerificationError(f"{name!r} has no memory at present: sync the engine first")
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        known = None if derived or not tensor.numel() else sums.get(key)
        total = known or WordSum()
        if known is None:
            total.add(0, as_bytes(tensor))
        if not derived:
            sums[key] = total
        found[name] = total.digest(meta_of(name, tensor))
    return found


def content_of(tensors: Iterable[Live], name: str, start: int) -> LiveContent | None:
    """A piece of the tensor `name`, from byte `start` on; None if there is no such tensor."""
    for live in tensors:
        if live.name == name:
            meta = meta_of(name, live.tensor)
            # A copy: storage that numpy has seen cannot be released any more.
            data = as_bytes(live.tensor)[start : start + PIECE_BYTES].to("cpu", copy=True)
            return LiveContent(meta.shape, meta.dtype, data.numpy().tobytes())
    return None


def flip_bit(tensor: torch.Tensor, position: float) -> None:
    """Flip the lowest bit of one byte of a tensor's own storage (tests only).

    Args:
        tensor: contiguous and not empty.
        position: which byte, from 0 (the first) to 1 (the last).
    """
    data = as_bytes(tensor)
    index = round(position * (data.numel() - 1))
    data[index] = data[index] ^ 1
