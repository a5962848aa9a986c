"""Frees and restores the memory of a scheduler on cpu, where SGLang's memory saver does nothing.

Tensors and views that the engine holds stay valid. On accelerators SGLang's own memory saver is
used (`rl_rollout_sglang.engine_api`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_core.rollout.protocol import KV_CACHE
from rl_core.rollout.zero_pages import zero

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class WorkerMemory:
    """What one scheduler has given back, by tag."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._storages: list[tuple[torch.UntypedStorage, int]] | None = None
        self._shapes: dict[str, torch.Size] | None = None

    def release(self, tag: str) -> int:
        """Free what `tag` names; bytes freed, 0 if it was free already."""
        return self._release_kv() if tag == KV_CACHE else self._release_weights()

    def resume(self, tag: str) -> None:
        """Allocate again, filled with zeros."""
        if tag == KV_CACHE:
            self._resume_kv()
        else:
            self._resume_weights()

    def _release_kv(self) -> int:
        if self._storages is not None:
            return 0
        pool = self._scheduler.token_to_kv_pool_allocator.get_kvcache()
        self._storages = [(item, item.nbytes()) for item in _storages(_tensors(vars(pool)))]
        for storage, _ in self._storages:
            storage.resize_(0)
        return sum(nbytes for _, nbytes in self._storages)

    def _resume_kv(self) -> None:
        for storage, nbytes in self._storages or ():
            storage.resize_(nbytes)
            zero(storage)
        self._storages = None

    def _release_weights(self) -> int:
        """Parameters give their storage up for an empty one: it was not made to be resized."""
        if self._shapes is not None:
            return 0
        self._shapes, freed = {}, 0
        for name, parameter in self._parameters():
            self._shapes[name] = parameter.shape
            freed += parameter.nbytes
            parameter.data = parameter.data.new_empty(0)
        return freed

    def _resume_weights(self) -> None:
        shapes, self._shapes = self._shapes or {}, None
        for name, parameter in self._parameters():
            if name in shapes:
                parameter.data = parameter.data.new_zeros(shapes[name])

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        model: torch.nn.Module = self._scheduler.tp_worker.model_runner.model
        yield from model.named_parameters()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once: layers share them. Those that cannot be resized are left alone."""
    found = {item.data_ptr(): item for item in (t.untyped_storage() for t in tensors)}
    return [item for item in found.values() if item.resizable() and item.nbytes()]
