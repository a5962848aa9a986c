"""How tensors are lent: one after the other, or a bucket of them at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from torch import Tensor

    from rl_core.metadata import TensorMeta

TensorStream: TypeAlias = "Iterator[tuple[TensorMeta, Tensor]]"
"""Tensors of one version in stream order; each is valid until the next one is asked for."""


@dataclass(frozen=True)
class LeasedTensor:
    """A whole tensor lent by a bucket.

    Attributes:
        meta: its name, shape and dtype.
        tensor: the values; valid only inside the lease.
        digest: content digest computed at the source, or None without light verification.
    """

    meta: TensorMeta
    tensor: Tensor
    digest: str | None = None


@dataclass
class BucketLease:
    """Tensors lent to a `with` block; their buffer is reused after its exit, not before.

    Attributes:
        entries: what is lent; empty after the exit.
        on_exit: called at the exit.
        on_error: told, before that, what the block raised, so that an engine can tell its peers.
    """

    entries: Sequence[LeasedTensor]
    on_exit: Callable[[], None] = field(default=lambda: None)
    on_error: Callable[[BaseException], None] = field(default=lambda _: None)

    def __enter__(self) -> Sequence[LeasedTensor]:
        return self.entries

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.entries = ()
        if error is not None:
            self.on_error(error)
        self.on_exit()
