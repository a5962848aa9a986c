"""Receiver: leases of one version to one consumer, one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rl_core.errors import LifecycleError, TransferError
from rl_core.interfaces import BucketLease
from rl_core.transfer.causes import known_cause
from rl_core.transfer.transport import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rl_core.interfaces import LeasedTensor


class Lending(ABC):
    """Lends what `run` yields, and tells what became of it.

    Attributes:
        complete: every tensor was handed over, on every receiver.
    """

    def __init__(self) -> None:
        self.complete = False
        self._lent: BucketLease | None = None
        self._consumer_error: BaseException | None = None

    @abstractmethod
    def run(self) -> Iterator[BucketLease]:
        """Receive; yields `lend(entries)` and calls `check_returned` when it goes on."""

    @abstractmethod
    def hear(self) -> None:
        """Raise what a peer has reported meanwhile, or that it is gone; must not block."""

    def leases(self, on_error: Callable[[BaseException], None]) -> Iterator[BucketLease]:
        """The leases, in stream order; `on_error` hears why it ended early, at once.

        A generator: when its consumer goes away, it is closed, and `on_error` hears that too.
        """
        self._on_error = on_error
        try:
            yield from self.run()
        except GeneratorExit:
            if self._consumer_error is None:
                on_error(TransferError("the consumer of the weights went away before their end"))
            raise
        except TransportError as error:
            cause = known_cause(error, self.hear)
            on_error(cause)
            raise cause from error
        except BaseException as error:
            on_error(error)
            raise
        self.complete = True

    def lend(self, entries: Sequence[LeasedTensor]) -> BucketLease:
        """A lease of `entries`."""
        self._lent = BucketLease(entries, self._returned, self._consumer_failed)
        return self._lent

    def _returned(self) -> None:
        self._lent = None

    def _consumer_failed(self, error: BaseException) -> None:
        if isinstance(error, GeneratorExit):
            return
        self._consumer_error = error
        self._on_error(error)

    def check_returned(self) -> None:
        """LifecycleError if the lease is still open, or its consumer failed in it."""
        if self._consumer_error is not None:
            msg = f"the consumer failed in a lease: {self._consumer_error}"
            raise LifecycleError(msg) from self._consumer_error
        if self._lent is not None:
            raise LifecycleError("the next lease was asked for while one is open; leave it first")
