"""The actor ranks, as those who ask all of them see them."""

from typing import Any, Protocol


class Actors(Protocol):
    """The actor ranks, called together: a `WorkerGroup`."""

    def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """`method(*args)` on every rank; results in rank order."""
        ...
