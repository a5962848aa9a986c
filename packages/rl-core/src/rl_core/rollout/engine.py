"""What a rollout server needs of its engine, whichever it is."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from rl_core.interfaces import LiveContent, LiveWeights, PauseMode
from rl_core.trajectory import Completion, GenerateRequest
from rl_core.versions import PolicyVersion


class Engine(Protocol):
    """A running engine with its processes; the façade of one backend over its untyped API.

    Lives in the server's process, on its event loop. Errors are those of `rl_core.errors`.

    Attributes:
        workers: who the engine ranks are, in rank order; at least their `pid`.
        load_path: how weights enter this engine.
    """

    workers: list[dict[str, int]]
    load_path: Literal["bracketed", "plain"]

    @property
    def alive(self) -> bool:
        """Whether the engine's processes are still there."""
        ...

    async def ended(self) -> None:
        """Return once the engine's processes are no longer all there."""
        ...

    @property
    def last_words(self) -> str:
        """What a dead engine said last, for the error; empty if nothing is known."""
        ...

    async def generate(
        self, request: GenerateRequest, committed: PolicyVersion | None
    ) -> Completion:
        """Complete one request, admitted while `committed` was served; RolloutError."""
        ...

    def tokens_underway(self) -> int:
        """Tokens that the engine has told of for requests that are not finished."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop scheduling; requests in flight end or stay as `mode` says, new ones queue."""
        ...

    async def resume(self) -> None:
        """Schedule again."""
        ...

    async def clear_kv_cache(self) -> None:
        """Drop cached prefixes; RolloutError unless it is confirmed."""
        ...

    async def zero_kv_cache(self) -> None:
        """Overwrite the cleared cache of a paused engine where a NaN left in it would come back."""
        ...

    async def set_version(self, version: str) -> None:
        """Stamp tokens with `version` from here on."""
        ...

    async def update(self, requests: Sequence[bytes]) -> list[bytes]:
        """Run one weight update on every rank.

        Args:
            requests: an encoded `UpdateRequest` for each rank.

        Returns:
            An encoded `UpdateResult` of each rank.
        """
        ...

    async def release(self, tags: Sequence[str]) -> dict[str, int]:
        """Free memory of a paused engine; bytes over all ranks by tag that could be freed."""
        ...

    async def restore(self, tags: Sequence[str]) -> None:
        """Allocate again what `release` freed, with whatever contents."""
        ...

    async def live_digests(self) -> list[dict[str, str]]:
        """Digests of what every rank computes with, by run-time name, in rank order."""
        ...

    async def live_weights(self) -> LiveWeights:
        """The same, with how the engine runs."""
        ...

    async def live_content(self, tp_rank: int, name: str, start: int) -> LiveContent | None:
        """A piece of a tensor that rank `tp_rank` computes with, from byte `start` on.

        None if it has no such tensor.
        """
        ...

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the engine's worker extension on every rank (tests, inspection)."""
        ...

    async def shutdown(self) -> None:
        """End the engine's processes."""
        ...
