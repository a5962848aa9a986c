"""Completions of calls that are under way, for those who ask before the calls end."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rl_core.trajectory import Completion, GenerateRequest

Ended = Callable[[Completion], None]
"""Notes that a request of a call has ended."""


class EarlyCompletions:
    """What a server keeps of each `generate` call, and only as long as that lasts.

    Lives on the server's event loop.
    """

    def __init__(self) -> None:
        self._calls: list[dict[str, Completion | None]] = []
        self._news = asyncio.Event()

    @contextmanager
    def opened(self, samples: Sequence[GenerateRequest]) -> Iterator[Ended]:
        """Keep what is noted of these samples until the end of the block, which is their call."""
        call: dict[str, Completion | None] = {sample.request_id: None for sample in samples}

        def ended(completion: Completion) -> None:
            call[completion.request_id] = completion
            self._wake()

        self._calls.append(call)
        try:
            yield ended
        finally:
            self._calls = [other for other in self._calls if other is not call]
            self._wake()

    async def finished(self, request_ids: Sequence[str], wait: float) -> list[Completion]:
        """See `SupportsEarlyCompletions.finished`."""
        try:
            async with asyncio.timeout(wait):
                while not (found := self._found(request_ids)) and self._any(request_ids):
                    await self._news.wait()
        except TimeoutError:
            return []
        return found

    def _found(self, request_ids: Sequence[str]) -> list[Completion]:
        kept = (call.get(name) for call in self._calls for name in request_ids)
        return [completion for completion in kept if completion is not None]

    def _any(self, request_ids: Sequence[str]) -> bool:
        return any(name in call for call in self._calls for name in request_ids)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
