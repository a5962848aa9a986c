"""Frees and restores the memory of an engine worker on cpu, where vLLM's sleep mode does nothing.

Storages are resized to nothing and back, so that every tensor and view that the engine holds stays
valid. On accelerators vLLM's own sleep mode is used (`rl_rollout_vllm.engine_api`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from rl_core.rollout.protocol import KV_CACHE, WEIGHTS
from rl_core.rollout.zero_pages import zero
from rl_rollout_vllm import cpu_patches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

logger = logging.getLogger(__name__)


class WorkerMemory:
    """What one worker has given back, by tag."""

    def __init__(self, worker: Any) -> None:
        self._runner = worker.model_runner
        self._freed: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}
        self._said = False

    def release(self, tag: str) -> int:
        """Free what `tag` names; bytes freed, 0 if it was free already or cannot be freed."""
        if tag in self._freed or not self._can_free(tag):
            return 0
        storages = [(item, item.nbytes()) for item in _storages(self._tensors(tag))]
        for storage, _ in storages:
            storage.resize_(0)
        self._freed[tag] = storages
        return sum(nbytes for _, nbytes in storages)

    def resume(self, tag: str) -> None:
        """Allocate again, filled with zeros."""
        for storage, nbytes in self._freed.pop(tag, []):
            storage.resize_(nbytes)
            zero(storage)

    def clear(self, tag: str) -> None:
        """Overwrite with zeros what is allocated of `tag`."""
        if tag not in self._freed:
            for storage in _storages(self._tensors(tag)):
                zero(storage)

    def _can_free(self, tag: str) -> bool:
        if tag != WEIGHTS or not cpu_patches.packed_linear(self._runner.model):
            return True
        if not self._said:
            logger.warning("releasing weights: not applicable, they are packed (0 bytes freed)")
            self._said = True
        return False

    def _tensors(self, tag: str) -> Iterator[torch.Tensor]:
        if tag == KV_CACHE:
            return _flattened(self._runner.kv_caches)
        return iter(self._runner.model.parameters())


def _flattened(items: Iterable[Any]) -> Iterator[torch.Tensor]:
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        else:
            yield from _flattened(item)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once: layers share them. Those that cannot be resized are left alone."""
    found = {item.data_ptr(): item for item in (t.untyped_storage() for t in tensors)}
    return [item for item in found.values() if item.resizable()]
