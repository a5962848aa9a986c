"""What a replica gives back while its devices do something else, and takes again."""

from collections.abc import Sequence

from rl_core.errors import RolloutError
from rl_core.rollout.engine import Engine
from rl_core.rollout.protocol import TAGS


class EngineMemory:
    """Keeps account of what an engine's ranks have freed. Runs in the server's event loop."""

    def __init__(self, engine: Engine, enabled: bool) -> None:
        """With `enabled` False nothing is ever freed."""
        self._engine = engine
        self._enabled = enabled
        self._released: set[str] = set()

    @property
    def released(self) -> frozenset[str]:
        """Tags that are not allocated at present."""
        return frozenset(self._released)

    async def release(self, tags: Sequence[str]) -> dict[str, int]:
        """Free memory; bytes by tag, 0 where nothing could be freed. The engine must be paused."""
        check_tags(tags)
        wanted = [tag for tag in TAGS if tag in tags and tag not in self._released]
        freed = dict.fromkeys(tags, 0)
        if not self._enabled or not wanted:
            return freed
        found = await self._engine.release(wanted)
        self._released |= set(found)
        return freed | found

    async def resume(self, tags: Sequence[str]) -> None:
        """Allocate again; what was never released is left alone."""
        check_tags(tags)
        wanted = [tag for tag in TAGS if tag in tags and tag in self._released]
        if wanted:
            await self._engine.restore(wanted)
            self._released -= set(wanted)


def check_tags(tags: Sequence[str]) -> None:
    """RolloutError for a tag that does not exist."""
    for tag in tags:
        if tag not in TAGS:
            raise RolloutError(f"no memory is called {tag!r}; there are: {', '.join(TAGS)}")
