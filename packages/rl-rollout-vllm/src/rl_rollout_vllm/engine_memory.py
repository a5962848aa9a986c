"""What a replica gives back while its devices do something else, and takes again."""

from collections.abc import Sequence

from rl_core.errors import RolloutError
from rl_rollout_vllm.engine_api import Engine

KV_CACHE = "kv_cache"
WEIGHTS = "weights"
TAGS = (KV_CACHE, WEIGHTS)


class EngineMemory:
    """Frees and allocates an engine's KV cache and weights, over all its ranks.

    On cpu by our worker extension, on accelerators by vLLM's sleep mode (never run: no such
    hardware was at hand).
    """

    def __init__(self, engine: Engine, device: str, enabled: bool) -> None:
        self._engine = engine
        self._on_cpu = device == "cpu"
        self._enabled = enabled
        self._released: set[str] = set()

    @property
    def released(self) -> frozenset[str]:
        """Tags that are not allocated at present."""
        return frozenset(self._released)

    async def release(self, tags: Sequence[str]) -> dict[str, int]:
        """Free memory; bytes by tag. The engine must be paused."""
        check_tags(tags)
        wanted = [tag for tag in TAGS if tag in tags and tag not in self._released]
        freed = dict.fromkeys(tags, 0)
        if not self._enabled or not wanted:
            return freed
        if self._on_cpu:
            ranks = await self._engine.rpc("rl_release", wanted)
            freed |= {tag: sum(rank[tag] for rank in ranks) for tag in wanted}
        else:
            freed |= await self._sleep(wanted)
        self._released |= {tag for tag in wanted if freed[tag] or not self._on_cpu}
        return freed

    async def resume(self, tags: Sequence[str]) -> None:
        """Allocate again; what was never released is left alone."""
        check_tags(tags)
        wanted = [tag for tag in TAGS if tag in tags and tag in self._released]
        if not wanted:
            return
        if self._on_cpu:
            await self._engine.rpc("rl_resume", wanted)
        else:
            await self._engine.wake_up(wanted)
        self._released -= set(wanted)

    async def _sleep(self, wanted: Sequence[str]) -> dict[str, int]:
        before = sum(await self._engine.rpc("rl_device_free"))
        if WEIGHTS in wanted:
            await self._engine.sleep()
        else:
            await self._engine.release_kv_cache()
        freed = sum(await self._engine.rpc("rl_device_free")) - before
        # The device tells only the sum; it is booked on the first tag.
        return {wanted[0]: max(0, freed)}


def check_tags(tags: Sequence[str]) -> None:
    """RolloutError for a tag that does not exist."""
    for tag in tags:
        if tag not in TAGS:
            raise RolloutError(f"no memory is called {tag!r}; there are: {', '.join(TAGS)}")
