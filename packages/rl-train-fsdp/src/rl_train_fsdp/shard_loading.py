"""This rank's shards of the checkpoint, read one conversion at a time."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rl_core.errors import ConfigError
from rl_train_fsdp.conversions import Conversions, module_tensors, tied_names

if TYPE_CHECKING:
    from pathlib import Path

    from rl_train_fsdp.model_directory import ModelDirectory


def check_complete(model: nn.Module, conversions: Conversions, directory: ModelDirectory) -> None:
    """ConfigError unless the checkpoint holds every tensor of the model, in its shape.

    Runs the conversions on meta tensors, so that nothing is read. Local.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module_tensors(model).items()}
    for rule in conversions.rules:
        sources = [_on_meta(directory, name) for name in rule.sources]
        for name, tensor in conversions.to_module(rule, sources).items():
            shape = expected.pop(name, None)
            if shape is not None and tuple(tensor.shape) != shape:
                msg = (
                    f"{directory.path}: {name!r} has shape {tuple(tensor.shape)}, config.json "
                    f"makes it {shape}; weights and configuration do not belong together"
                )
                raise ConfigError(msg)
    if expected:
        msg = (
            f"{directory.path} lacks {len(expected)} tensors of {type(model).__name__}, the first "
            f"is {min(expected)!r}; fetch the model again"
        )
        raise ConfigError(msg)


def load_shards(model: nn.Module, conversions: Conversions, directory: ModelDirectory) -> None:
    """Copy this rank's part of every tensor from the checkpoint. Local: each rank reads alone.

    Files are memory-mapped; of a tensor that needs no conversion only this rank's bytes are
    touched.
    """
    targets = module_tensors(model)
    with torch.no_grad(), ExitStack() as stack:
        files = _Files(stack)
        for rule in conversions.rules:
            sources = [files.read(directory.tensors[name].file, name) for name in rule.sources]
            for name, tensor in conversions.to_module(rule, sources).items():
                if name in targets:
                    _copy_shard(targets[name], tensor)


def unused_names(model: nn.Module, conversions: Conversions) -> list[str]:
    """Checkpoint tensors that the model has no place for. Local."""
    known = {*tied_names(model), *(name for tied in tied_names(model).values() for name in tied)}
    rules = [rule for rule in conversions.rules if rule.converter is None]
    return [rule.sources[0] for rule in rules if rule.target not in known]


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """The part of `full` that `like` holds on this rank; a view.

    FSDP2 cuts as `torch.chunk` does: equal chunks, the last one shorter, then empty ones.
    """
    part = full
    for dim, placement in enumerate(like.placements):
        if not isinstance(placement, Shard):
            continue
        chunks = part.chunk(like.device_mesh.size(dim), placement.dim)
        mine = like.device_mesh.get_local_rank(dim)
        empty = part.narrow(placement.dim, 0, 0)
        part = chunks[mine] if mine < len(chunks) else empty
    return part


def _copy_shard(target: Tensor, full: Tensor) -> None:
    if isinstance(target, DTensor):
        target.to_local().copy_(local_part(full, target))
    else:
        target.copy_(full)


def _on_meta(directory: ModelDirectory, name: str) -> Tensor:
    return torch.empty(directory.tensors[name].shape, device="meta")


class _Files:
    """Open safetensors files, each opened once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, Any] = {}

    def read(self, file: Path, name: str) -> Tensor:
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            tensor: Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            msg = f"{file}: {name!r} cannot be read ({error}); fetch it again"
            raise ConfigError(msg) from error
        return tensor
