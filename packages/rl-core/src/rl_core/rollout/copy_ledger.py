"""Finds tensors that an engine's weight loaders cut short or leave out without a word.

A loader takes this rank's part of a tensor by slicing, so that a tensor with too many rows loads
"successfully", and passes over some names. While a batch is loaded, the ledger counts how many
elements of each tensor are copied into parameters. A rank takes a whole tensor, or the n-th part
of it where n divides the number of ranks; anything else is a tensor of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.errors import ManifestMismatchError

Batch = Sequence[tuple[str, Tensor]]

DERIVED = ("rotary_emb.inv_freq",)
"""Ends of names that old checkpoints carry and every engine computes itself."""


@dataclass(frozen=True)
class Copy:
    """One copy that a loader made.

    Attributes:
        source: name of the tensor.
        target: address of the storage that it went into.
        count: elements.
        source_dtype: of the tensor.
        target_dtype: of the parameter.
    """

    source: str
    target: int
    count: int
    source_dtype: torch.dtype
    target_dtype: torch.dtype


class CopyLedger(TorchDispatchMode):  # type: ignore[misc]
    """Counts elements copied from each tensor of a batch, while it is the active mode.

    Attributes:
        copied: elements by tensor name.
        unknown: elements copied from memory that is no tensor of the batch (a loader transformed
            a tensor first).
        copies: every copy from a tensor of the batch, in order.
    """

    def __init__(self, batch: Batch, meta_only: bool, direct: Container[int] = frozenset()) -> None:
        """Watch a batch.

        Args:
            batch: tensors by name.
            meta_only: watch copies into meta tensors only (a dry pass), not the ones for good.
            direct: addresses of storages that a dry pass fills for good; what is copied again
                later is not counted.
        """
        super().__init__()
        self._direct = direct
        self._names = {tensor.untyped_storage().data_ptr(): name for name, tensor in batch}
        self._meta_only = meta_only
        self.copied = dict.fromkeys(self._names.values(), 0)
        self.unknown = 0
        self.copies: list[Copy] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note a copy, and carry it out."""
        del types
        if func is torch.ops.aten.copy_.default and self._counts(args[0], args[1]):
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _counts(self, target: Tensor, source: Tensor) -> bool:
        if target.is_meta or not self._meta_only:
            return True
        if source.is_meta or target.untyped_storage().data_ptr() not in self._direct:
            return False
        name = self._names.get(source.untyped_storage().data_ptr())
        return name is not None and not self.copied[name]

    def _note(self, target: Tensor, source: Tensor) -> None:
        name = None if source.is_meta else self._names.get(source.untyped_storage().data_ptr())
        if name is None:
            self.unknown += target.numel()
        else:
            self.copied[name] += target.numel()
            into = target.untyped_storage().data_ptr()
            self.copies.append(Copy(name, into, target.numel(), source.dtype, target.dtype))


class Shares:
    """What part of a tensor one rank may take."""

    def __init__(
        self, vocabularies: Iterable[nn.Module], ranks: int, skipped: Iterable[str]
    ) -> None:
        """Look at a model before its update.

        Args:
            vocabularies: the model's embeddings that are split over the ranks and padded; both
                engines' have `shard_indices.num_org_elements` and `embedding_dim`.
            ranks: tensor-parallel ranks.
            skipped: names that the engine leaves out for good reason (tied output heads).
        """
        self._ranks = ranks
        self._skipped = frozenset(skipped)
        self._vocabulary = {
            int(layer.shard_indices.num_org_elements) * int(layer.embedding_dim)
            for layer in vocabularies
        }

    def check(self, batch: Batch, ledger: CopyLedger) -> None:
        """ManifestMismatchError naming the first tensor that was cut short or left out."""
        for name, tensor in batch:
            copied = ledger.copied[name]
            if copied == 0 and tensor.numel() and not ledger.unknown:
                self._check_skipped(name)
            elif copied and not self._fits(tensor.numel(), copied):
                msg = (
                    f"tensor {name!r} of shape {tuple(tensor.shape)} does not fit the engine's "
                    f"model: rank took {copied} of {tensor.numel()} elements"
                )
                raise ManifestMismatchError(msg)

    def _check_skipped(self, name: str) -> None:
        if name not in self._skipped and not name.endswith(DERIVED):
            raise ManifestMismatchError(f"the engine loads no part of tensor {name!r}")

    def _fits(self, whole: int, copied: int) -> bool:
        if copied in self._vocabulary:  # padded; the loader itself has compared the rows
            return True
        if copied % whole == 0:  # whole, into one or several parameters
            return True
        return whole % copied == 0 and self._ranks % (whole // copied) == 0
