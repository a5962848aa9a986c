"""One rollout replica, as its owner sees it: starts the server, knows its address, ends it."""

from rl_core.interfaces import Launcher, Placement
from rl_core.rollout.replica import ServerReplica
from rl_rollout_vllm.config import VllmConfig
from rl_rollout_vllm.server_env import server_env


class VllmReplica(ServerReplica):
    """Starts a `VllmServer` through a launcher. Runs in the controller's process."""

    engine_name = "vLLM"
    server_cls = "rl_rollout_vllm.server:VllmServer"

    def __init__(self, config: VllmConfig, launcher: Launcher, placement: Placement) -> None:
        super().__init__(config, launcher, placement)
        self._vllm_config = config

    def _environment(self) -> dict[str, str]:
        return server_env(self._vllm_config, self._placement)
