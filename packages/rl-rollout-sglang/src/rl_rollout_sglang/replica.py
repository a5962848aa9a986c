"""One rollout replica, as its owner sees it: starts the server, knows its address, ends it."""

from rl_core.interfaces import Launcher, Placement
from rl_core.rollout.replica import ServerReplica
from rl_rollout_sglang.config import SglangConfig
from rl_rollout_sglang.server_env import server_env


class SglangReplica(ServerReplica):
    """Starts an `SglangServer` through a launcher. Runs in the controller's process."""

    engine_name = "SGLang"
    server_cls = "rl_rollout_sglang.server:SglangServer"

    def __init__(self, config: SglangConfig, launcher: Launcher, placement: Placement) -> None:
        super().__init__(config, launcher, placement)
        self._sglang_config = config

    def _environment(self) -> dict[str, str]:
        return server_env(self._sglang_config, self._placement)
