"""The processes of a run: actor ranks, rollout replicas, and the weight sync between them."""

import logging
from dataclasses import fields
from typing import Any

from minirl.checkpoint_manager import CheckpointEngineManager
from minirl.checkpoint_worker import CheckpointWorker
from minirl.fused_sync import FusedWeightSync
from minirl.generation_watch import GenerationLimits
from minirl.live_member import share
from minirl.live_verification import LiveSettings, LiveVerification
from minirl.perturbation import Perturbation
from minirl.plan import RunPlan
from minirl.ray_launcher import RayLauncher
from minirl.resource_pool import ResourcePool
from minirl.rollout_manager import RolloutManager
from minirl.run_output import RunOutput
from minirl.run_state import VERSION_FILE
from minirl.sync_settings import SyncSettings
from minirl.weight_sync import WeightSync
from minirl.worker_group import WorkerGroup
from minirl.worker_process import ProcessSettings
from minirl.workers import ActorWorker, FusedActorRolloutWorker
from rl_core import plugins
from rl_core.channel import new_key
from rl_core.digests import XXH3_128
from rl_core.interfaces import RolloutMode, TransferRole
from rl_core.layout import LayoutSpec
from rl_core.logs import kv
from rl_core.versions import VersionStore

_logger = logging.getLogger(__name__)

FUSED = "fused"
CONTINUE = "continue"
ALL_REPLICAS = "all"
_TENSOR = "tensor"
"""How reports name the way of the weights in fused mode."""

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
    weight_sync: WeightSync
    _receivers: WorkerGroup

    def __init__(self, plan: RunPlan, settings: ProcessSettings) -> None:
        self._plan = plan
        self._config = plan.config
        self._settings = settings
        self._fused = plan.config.cluster.mode == FUSED
        self._actor_pool = ResourcePool("actor", plan.actor_world, plan.device)
        self._rollout_pool = (
            self._actor_pool
            if self._fused
            else ResourcePool("rollout", plan.rollout_world, plan.device)
        )

    def start(self, output: RunOutput, run_id: str) -> None:
        """Start everything; no weights have been published yet."""
        _logger.info("Trainer initialized. Initializing workers and rollout servers...")
        self._reserve()
        if self._config.debug.train_only is not None:
            self._start_actors()
            _logger.info("Actor workers are ready. Training on recorded samples, without rollout.")
            return
        self._create_rollout()
        self._start_actors()
        self._start_rollout()
        _logger.info("[Init] Initializing checkpoint engine manager.")
        versions = VersionStore(output.path / VERSION_FILE)
        connect = self._connect_fused if self._fused else self._connect_separate
        self.weight_sync = connect(versions, run_id)
        if self._plan.layout is not None:
            self._look_inside(self._plan.layout, run_id)
        kind = "mock RL loop" if self._config.trainer.mock else "RL loop"
        _logger.info("Workers and rollout servers are ready. Starting %s...", kind)

    def shutdown(self) -> None:
        """Stop what was started, as far as it was. Idempotent."""
        if hasattr(self, "rollout"):
            self.rollout.shutdown(STOP_TIMEOUT_S)
        for group in ("workers", "_receivers"):
            if hasattr(self, group):
                getattr(self, group).kill()
        self._actor_pool.release()
        self._rollout_pool.release()

    # ------------------------------------------------------------------ the parts

    def _reserve(self) -> None:
        plan = self._plan
        _logger.info(
            "[Init] Creating Ray resource pools. %s",
            kv(actor=plan.actor_world, rollout=plan.rollout_world, shared=self._fused),
        )
        self._actor_pool.reserve(RESERVE_TIMEOUT_S)
        if not self._fused:
            self._rollout_pool.reserve(RESERVE_TIMEOUT_S)

    def _start_actors(self) -> None:
        plan = self._plan
        _logger.info(
            "[Init] Creating actor workers. %s",
            kv(world_size=plan.actor_world, device=plan.device),
        )
        worker_cls = FusedActorRolloutWorker if self._fused else ActorWorker
        self.workers = WorkerGroup(
            "actor", self._actor_pool, worker_cls, self._settings, self._environment()
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
        self.rollout = RolloutManager(
            rollout.name,
            self._rollout_config(),
            launcher,
            goes_on=rollout.on_replica_failure == CONTINUE,
            limits=GenerationLimits(rollout.generate_timeout_s, rollout.stall_timeout_s),
        )
        mode = RolloutMode.HYBRID if self._fused else RolloutMode.STANDALONE
        self.rollout.create(self._rollout_pool, self._plan.rollout_world, mode)

    def _rollout_config(self) -> dict[str, Any]:
        """The plan's, with the run's directory for the logs of an engine that keeps some itself."""
        backend = plugins.load_backend(plugins.ROLLOUT_BACKENDS, self._config.rollout.name)
        known = {item.name for item in fields(plugins.load_object(backend.config_cls))}
        logs = {"log_dir": self._settings.log_dir} if "log_dir" in known else {}
        return self._plan.rollout_config | logs

    def _start_rollout(self) -> None:
        _logger.info("[Init] Starting rollout servers.")
        rollout = self._config.rollout
        self.rollout.start(rollout.start_timeout_s, rollout.min_replicas)

    def _connect_fused(self, versions: VersionStore, run_id: str) -> WeightSync:
        """Give the first actor ranks an adapter each to the engine rank on their device."""
        for rank in range(self.rollout.world_size):
            arguments = self.rollout.adapter_arguments(rank)
            self.workers.call_rank(rank, "init_rollout", *arguments, timeout_s=INIT_TIMEOUT_S)
        settings = self._sync_settings(run_id, "fused/in-process")
        return FusedWeightSync(self.workers, self.rollout, versions, settings)

    def _connect_separate(self, versions: VersionStore, run_id: str) -> WeightSync:
        """Put a checkpoint worker beside each engine rank, and both ends into the workers."""
        self._receivers = WorkerGroup(
            "checkpoint_worker",
            self._rollout_pool,
            CheckpointWorker,
            self._settings,
            self._environment(),
        )
        key = new_key()
        for role, group in (("sender", self.workers), ("receiver", self._receivers)):
            self._init_transfer(role, group, run_id, key)
        settings = self._sync_settings(run_id, self._config.checkpoint_engine.backend)
        manager = CheckpointEngineManager(
            self.workers, self._receivers, self.rollout, versions, settings
        )
        manager.introduce(INIT_TIMEOUT_S)
        return manager

    def _look_inside(self, layout: LayoutSpec, run_id: str) -> None:
        """Let the actor ranks derive what the engine ranks must hold: a share of them each."""
        size, world = self.rollout.tp_size, self.workers.world_size
        self.workers.call_each(
            "init_live",
            lambda rank: (layout, share(rank, world, size), size),
            timeout_s=INIT_TIMEOUT_S,
        )
        live = self._live_settings(layout, run_id)
        self.weight_sync.live = LiveVerification(live, self.rollout, self.workers)
        section = self._config.checkpoint_engine
        if section.debug.perturb_before_sync:
            self.weight_sync.perturbation = Perturbation(
                self.workers, run_id, section.debug.perturb_delta, section.timeout_s
            )

    def _init_transfer(self, role: str, group: WorkerGroup, run_id: str, key: bytes) -> None:
        config = self._config.checkpoint_engine
        verify = config.debug.verify_light_transfer

        def arguments(rank: int) -> tuple[str, dict[str, Any], TransferRole]:
            member = TransferRole(
                role=role,
                rank=rank,
                device=self._plan.device,
                host=group.host_of(rank),
                key=key,
                run_id=run_id,
                bucket_megabytes=config.update_weights_bucket_megabytes,
                digest_kind=XXH3_128 if verify else None,
            )
            return config.backend, self._plan.transfer_options, member

        group.call_each("init_transfer", arguments, timeout_s=INIT_TIMEOUT_S)

    # ------------------------------------------------------------------ arguments

    def _sync_settings(self, run_id: str, checkpoint_engine: str) -> SyncSettings:
        config = self._config
        return SyncSettings(
            run_id=run_id,
            mode=config.cluster.mode,
            checkpoint_engine=checkpoint_engine,
            timeout_s=config.checkpoint_engine.timeout_s,
            free_cache_engine=config.rollout.free_cache_engine,
            verify_light=config.checkpoint_engine.debug.verify_light_transfer,
        )

    def _live_settings(self, layout: LayoutSpec, run_id: str) -> LiveSettings:
        section = self._config.checkpoint_engine
        return LiveSettings(
            spec=layout,
            source=_TENSOR if self._fused else section.backend,
            every=section.debug.verify_every,
            all_replicas=section.debug.verify_replicas == ALL_REPLICAS,
            strict=section.debug.strict,
            root_dir=section.root_dir,
            keep_last=section.debug.keep_last,
            timeout_s=section.timeout_s,
            run_id=run_id,
        )

    def _environment(self) -> dict[str, str]:
        cluster = self._config.cluster
        one_host = cluster.ray_address is None and self._plan.device == "cpu"
        return {**_WORKER_ENVIRONMENT, **({"GLOO_SOCKET_IFNAME": "lo"} if one_host else {})}
