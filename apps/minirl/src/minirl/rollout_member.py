"""One rank's adapter to its engine rank, as workers of both modes hold it."""

from collections.abc import Mapping
from typing import Any

from rl_core import plugins
from rl_core.interfaces import Handle, RolloutAdapter


class RolloutMember:
    """Mixed into workers that feed an engine rank: builds the rollout adapter."""

    _adapter: RolloutAdapter | None = None
    _tp_rank: int = 0

    def init_rollout(
        self, backend: str, config: Mapping[str, Any], server: Handle, tp_rank: int
    ) -> None:
        """Connect to the engine rank `tp_rank` of the replica behind `server`."""
        entry, typed = plugins.load_configured(plugins.ROLLOUT_BACKENDS, backend, config, "rollout")
        self._tp_rank = tp_rank
        self._adapter = plugins.load_object(entry.adapter)(server, tp_rank, typed)
