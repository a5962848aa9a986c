"""Full tensors out of the shards, under their checkpoint names: the manifest and the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl_core.metadata import Manifest, TensorMeta
from rl_core.torch import dtype_name, dtype_of
from rl_train_fsdp.conversions import Conversions, module_tensors, tied_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from rl_core.interfaces import TensorStream
    from rl_core.versions import PolicyVersion
    from rl_train_fsdp.model_directory import ModelDirectory


class FullTensors:
    """What leaves one sharded model.

    A tensor goes out in the wire dtype, if there is one, except where the model directory stores
    it wider than the model's own dtype (a float32 router in a bfloat16 model): then the authors
    meant it to be wide. A lossy cast shows as `source_dtype` in the metadata.
    """

    def __init__(
        self,
        model: nn.Module,
        conversions: Conversions,
        directory: ModelDirectory,
        wire_dtype: str | None,
    ) -> None:
        self._model = model
        self._conversions = conversions
        self._wire_dtype = wire_dtype
        self._wide = _wider_than_the_model(directory)
        self._gathered: dict[str, torch.dtype] = {}
        self._metas = self._describe()

    def manifest(self, version: PolicyVersion, run_id: str) -> Manifest:
        """The structure of what `stream` yields, in its order. Local, equal on all ranks."""
        return Manifest(version, tuple(self._metas.values()), run_id)

    def stream(self) -> TensorStream:
        """Gather and yield one tensor after the other, on the device. Collective at each step.

        A module tensor that is several checkpoint tensors (a layer's experts) is gathered once,
        and what it yields are views of it.
        """
        tensors = module_tensors(self._model)
        for group in self._conversions.groups:
            # Casting before gathering moves fewer bytes, and gives the same values.
            full = {
                name: _gather(tensors[name].detach().to(self._gathered[name])) for name in group
            }
            for name, tensor in self._conversions.to_checkpoint(full).items():
                meta = self._metas[name]
                yield meta, tensor.to(dtype_of(meta.dtype)).contiguous()
            del full, tensor  # before the next one is gathered

    def _describe(self) -> dict[str, TensorMeta]:
        """Metadata by checkpoint name in stream order; notes the dtype to gather each group in."""
        metas: dict[str, TensorMeta] = {}
        aliases = self._aliases()
        tensors = module_tensors(self._model)
        for group in self._conversions.groups:
            on_meta = {name: _like_on_meta(tensors[name]) for name in group}
            parts = self._conversions.to_checkpoint(on_meta)
            for name, tensor in parts.items():
                metas[name] = self._meta(name, tensor, aliases.get(name, ()))
            wires = {metas[name].dtype for name in parts}
            for name in group:
                same = len(wires) == 1 and tensors[name].is_floating_point()
                self._gathered[name] = dtype_of(*wires) if same else tensors[name].dtype
        return metas

    def _meta(self, name: str, tensor: Tensor, aliases: tuple[str, ...]) -> TensorMeta:
        source, wire = dtype_name(tensor.dtype), dtype_name(self._wire(tensor, name))
        shape = tuple(tensor.shape)
        lossy = None if source == wire else source
        return TensorMeta(name, shape, wire, source_dtype=lossy, aliases=aliases)

    def _aliases(self) -> Mapping[str, tuple[str, ...]]:
        """Further checkpoint names of tied tensors, by the checkpoint name that has the bytes."""
        aliases = {}
        for name, others in tied_names(self._model).items():
            if others:
                first, *rest = [self._checkpoint_name(each) for each in (name, *others)]
                aliases[first] = tuple(rest)
        return aliases

    def _checkpoint_name(self, module_name: str) -> str:
        one = torch.empty(1, 1, device="meta")
        return next(iter(self._conversions.to_checkpoint({module_name: one})))

    def _wire(self, tensor: Tensor, checkpoint_name: str) -> torch.dtype:
        if self._wire_dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        stored = self._wide.get(checkpoint_name)
        return dtype_of(self._wire_dtype if stored is None else stored)


def _wider_than_the_model(directory: ModelDirectory) -> dict[str, str]:
    """Dtype of each floating tensor that is stored with more bits than the model's own dtype."""
    main = dtype_of(directory.main_dtype)
    known = {}
    for name, stored in directory.tensors.items():
        dtype = getattr(torch, stored.dtype, None)
        if dtype is not None and dtype.is_floating_point and dtype.itemsize > main.itemsize:
            known[name] = stored.dtype
    return known


def _like_on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
