"""The processes of a run: actor ranks, rollout replicas, and the weight sync between them."""

import logging
from collections.abc import Mapping

from minirl.plan import RunPlan
from minirl.ray_launcher import RayLauncher
from minirl.resource_pool import ResourcePool
from minirl.rollout_manager import RolloutManager
from minirl.run_output import RunOutput
from minirl.weight_sync import FusedWeightSync, SyncSettings
from minirl.worker_group import WorkerGroup
from minirl.worker_process import ProcessSettings
from minirl.workers import FusedActorRolloutWorker
from rl_core.interfaces import RolloutMode
from rl_core.logs import kv
from rl_core.versions import VersionStore

_logger = logging.getLogger(__name__)

RESERVE_TIMEOUT_S = 60.0
INIT_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 6.0

_WORKER_ENVIRONMENT = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}


class RLSystem:
    """Starts the parts of a run in order and stops them in any state.

    Attributes:
        workers: the actor ranks.
        rollout: the rollout replicas.
        weight_sync: publishes the actor's weights to the replicas.
    """

    workers: WorkerGroup
    rollout: RolloutManager
    weight_sync: FusedWeightSync

    def __init__(self, plan: RunPlan, settings: ProcessSettings) -> None:
        self._plan = plan
        self._config = plan.config
        self._settings = settings
        cluster = plan.config.cluster
        per_node = cluster.actor.n_gpus_per_node or 1
        self._pool = ResourcePool("actor", per_node, cluster.actor.nnodes, plan.device)

    def start(self, output: RunOutput, run_id: str) -> None:
        """Start everything; no weights have been published yet."""
        _logger.info("Trainer initialized. Initializing workers and rollout servers...")
        self._reserve()
        self._create_rollout()
        self._start_actors()
        self._start_rollout()
        _logger.info("[Init] Initializing checkpoint engine manager.")
        checkpoint_engine = self._config.checkpoint_engine
        self.weight_sync = FusedWeightSync(
            self.workers,
            self.rollout,
            VersionStore(output.path / "version.json"),
            SyncSettings(
                run_id=run_id,
                timeout_s=checkpoint_engine.timeout_s,
                free_cache_engine=self._config.rollout.free_cache_engine,
                verify_light=checkpoint_engine.debug.verify_light_transfer,
            ),
        )
        kind = "mock RL loop" if self._config.trainer.mock else "RL loop"
        _logger.info("Workers and rollout servers are ready. Starting %s...", kind)

    def shutdown(self) -> None:
        """Stop what was started, as far as it was. Idempotent."""
        if hasattr(self, "rollout"):
            self.rollout.shutdown(STOP_TIMEOUT_S)
        if hasattr(self, "workers"):
            self.workers.kill()
        self._pool.release()

    def _reserve(self) -> None:
        plan = self._plan
        _logger.info(
            "[Init] Creating Ray resource pools. %s",
            kv(actor=plan.actor_world, rollout=plan.rollout_world, shared=True),
        )
        self._pool.reserve(RESERVE_TIMEOUT_S)

    def _start_actors(self) -> None:
        plan = self._plan
        _logger.info(
            "[Init] Creating actor workers. %s",
            kv(world_size=plan.actor_world, device=plan.device),
        )
        self.workers = WorkerGroup(
            self._pool, FusedActorRolloutWorker, self._settings, self._environment()
        )
        _logger.info("[Init] Initializing actor models. %s", kv(path=plan.model_path))
        places = self.workers.places(INIT_TIMEOUT_S)
        backend = self._config.actor.engine_config.backend
        self.workers.call_each(
            "init_model",
            lambda rank: (backend, plan.train_config, places[rank]),
            timeout_s=INIT_TIMEOUT_S,
        )

    def _create_rollout(self) -> None:
        """Servers import their engine while the actors load the model."""
        rollout = self._config.rollout
        launcher = RayLauncher(self._settings)
        self.rollout = RolloutManager(rollout.name, self._plan.rollout_config, launcher)
        self.rollout.create(self._pool, self._plan.rollout_world, RolloutMode.HYBRID)

    def _start_rollout(self) -> None:
        rollout = self._config.rollout
        _logger.info("[Init] Starting rollout servers.")
        self.rollout.start(rollout.start_timeout_s)
        for rank in range(self.rollout.world_size):
            self.workers.call_rank(
                rank,
                "init_rollout",
                rollout.name,
                self._plan.rollout_config,
                self.rollout.server_of(rank),
                rank % self.rollout.tp_size,
                timeout_s=INIT_TIMEOUT_S,
            )

    def _environment(self) -> Mapping[str, str]:
        single_node = self._config.cluster.actor.nnodes == 1 and self._plan.device == "cpu"
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if single_node else {}
        return {**_WORKER_ENVIRONMENT, **loopback}
