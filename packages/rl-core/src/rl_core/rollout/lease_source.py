"""The stream of leases that an adapter is given, told apart from what happens to it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rl_core.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_core.interfaces import BucketLease

logger = logging.getLogger(__name__)


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

    def drain(self, *, failed: bool) -> None:
        """Consume what is left: producing weights is a collective of all ranks.

        Where the update has `failed` already, what the leases raise is only logged: most often it
        says that their consumer failed, and would hide why.
        """
        try:
            for lease in self._leases:
                with lease:
                    pass
        except Exception as error:
            # Edge to the producer, which may raise anything.
            if not failed:
                raise
            logger.warning("the stream ended early: %s", error)
