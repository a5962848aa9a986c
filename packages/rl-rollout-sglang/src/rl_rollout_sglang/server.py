"""The server of one SGLang replica; see `rl_core.rollout.server`. SGLang is imported when asked."""

import importlib
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rl_core.errors import ComponentLoadError, ComponentNotFoundError
from rl_core.gate import ServingGate
from rl_core.interfaces import Placement
from rl_core.rollout.engine import Engine
from rl_core.rollout.server import Http, RolloutServer
from rl_rollout_sglang import cpu_plugin
from rl_rollout_sglang.config import SglangConfig
from rl_rollout_sglang.installed_engine import ENGINE

if TYPE_CHECKING:
    from rl_rollout_sglang.engine_api import SglangEngine

logger = logging.getLogger(__name__)


class SglangServer(RolloutServer):
    """One replica's server."""

    engine_name = "SGLang"

    def __init__(self, config: SglangConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        self._sglang_config = config

    async def use_load_path(self, wanted: str) -> None:
        """Update by `bracketed` or `plain` from here on (tests and comparisons)."""
        from rl_rollout_sglang.engine_api import load_path

        self._check_running()
        self._engine.load_path = load_path(wanted)

    async def disable_patches(self, names: Sequence[str]) -> None:
        """Turn off patches for cpu, here and in every scheduler (tests only)."""
        cpu_plugin.switch.disable(names)
        await self.worker_call("disable_patches", list(names))

    def _import_engine(self) -> None:
        if importlib.util.find_spec("sglang") is None:
            msg = "SGLang is not installed: pip install 'rl-rollout-sglang[cpu]' (or [engine])"
            raise ComponentNotFoundError(msg)
        ENGINE.check_version()
        try:
            importlib.import_module("rl_rollout_sglang.engine_api")
            importlib.import_module("rl_rollout_sglang.http_server")
        except ImportError as error:
            msg = f"SGLang is installed but could not be imported: {error}"
            raise ComponentLoadError(msg) from error

    async def _start_engine(self, scratch: str) -> Engine:
        if remark := ENGINE.remark():
            logger.warning(remark)
        from rl_rollout_sglang.engine_api import SglangEngine

        return await SglangEngine.start(self._sglang_config, self._placement, scratch)

    async def _start_http(self, engine: Engine, gate: ServingGate) -> Http:
        from rl_rollout_sglang.http_server import HttpServer

        running = cast("SglangEngine", engine)
        timeout_s = self._config.start_timeout_s
        return await HttpServer.start(
            running, gate, self._placement.host, timeout_s, self.live_weights
        )

    def _route_logs(self) -> None:
        """Keep what SGLang logs in this process off the root logger, which it would take over."""
        log = logging.getLogger("sglang")
        log.setLevel(self._config.log_level)
        log.propagate = False
        if self._config.log_dir is None:
            log.addHandler(logging.StreamHandler())
            return
        directory = Path(self._config.log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"sglang-{self._placement.replica_rank}-server.log"
        handler = logging.FileHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
