"""The seed's verification round: real processes and syncs, sleep instead of work."""

import logging
import time

from minirl.config import MiniRLConfig
from minirl.system import RLSystem
from rl_core.logs import kv
from rl_core.versions import PolicyVersion

_logger = logging.getLogger(__name__)

MOCK_SECONDS = 1.0


def run_mock_loop(config: MiniRLConfig, system: RLSystem) -> None:
    """Sync initial weights, pretend to generate, pretend to train, sync trained weights."""
    _logger.info("[Step 1/4] Sync initial actor weights to rollout before training.")
    system.weight_sync.sync(PolicyVersion(1, 0), "initial")
    _logger.info("[Step 2/4] Run mock rollout generation.")
    _logger.info("[Rollout] mock generate %s", kv(backend=config.rollout.name))
    time.sleep(MOCK_SECONDS)
    _logger.info("[Step 3/4] Run mock actor training.")
    engine = config.actor.engine_config
    _logger.info(
        "[Actor] mock train step: %s",
        kv(
            backend=engine.backend,
            param_offload=engine.param_offload,
            optimizer_offload=engine.optimizer_offload,
        ),
    )
    time.sleep(MOCK_SECONDS)
    _logger.info("[Step 4/4] Sync trained actor weights to rollout.")
    system.weight_sync.sync(system.weight_sync.version_of(epoch=1, step=1), "trained")
    _logger.info("Mock RL loop finished.")
