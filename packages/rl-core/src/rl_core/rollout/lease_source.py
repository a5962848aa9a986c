"""The stream of leases that an adapter is given, told apart from what happens to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_core.interfaces import BucketLease


class SourceFailedError(WeightSyncError):
    """Producing the weights failed, as opposed to sending them.

    Attributes:
        cause: what the producer raised.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


class LeaseSource:
    """Iterates over leases; an error of theirs comes out as SourceFailedError."""

    def __init__(self, leases: Iterator[BucketLease]) -> None:
        self._leases = iter(leases)

    def __iter__(self) -> LeaseSource:
        return self

    def __next__(self) -> BucketLease:
        try:
            return next(self._leases)
        except StopIteration:
            raise
        except Exception as error:
            # Edge to the producer, which may raise anything.
            raise SourceFailedError(error) from error

    def drain(self) -> None:
        """Consume what is left: producing weights is a collective of all ranks."""
        for lease in self._leases:
            with lease:
                pass
