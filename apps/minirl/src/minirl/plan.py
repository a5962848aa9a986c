"""What a run is going to do, checked as a whole before anything starts."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from minirl.algorithm_checks import check_algorithm
from minirl.config import CheckpointEngineConfig, MiniRLConfig
from minirl.config_keys import value_of
from minirl.devices import detect_device
from minirl.live_plan import live_layout
from minirl.memory_budget import check_memory
from minirl.model_check import check_model, check_same_model
from minirl.models import resolve_model
from minirl.value_checks import check_values
from rl_core import plugins
from rl_core.errors import ComponentNotFoundError, ConfigError
from rl_core.interfaces import SupportsEngineCheck, SupportsFileCheck, SupportsParameterCount
from rl_core.layout import LayoutSpec

_NAME_KEYS = {plugins.TRAIN_ENGINES: "engine_config.backend", plugins.ROLLOUT_BACKENDS: "name"}


@dataclass(frozen=True)
class RunPlan:
    """A checked configuration and what follows from it.

    Attributes:
        config: the configuration.
        device: cpu, cuda or npu.
        model_path: Hugging Face directory of the policy.
        embedded_model: whether it is the embedded one.
        actor_world: number of actor ranks.
        rollout_world: number of rollout ranks.
        train_config: nested values for the train backend's configuration class.
        rollout_config: values for the rollout backend's configuration class.
        transfer_options: values for the checkpoint engine's; empty in fused mode.
        layout: how the engine lays out the model; None without live verification.
    """

    config: MiniRLConfig
    device: str
    model_path: Path
    embedded_model: bool
    actor_world: int
    rollout_world: int
    train_config: dict[str, Any]
    rollout_config: dict[str, Any]
    transfer_options: dict[str, Any]
    layout: LayoutSpec | None

    @property
    def slots(self) -> int:
        """Devices that the run needs, over all nodes."""
        shared = self.config.cluster.mode == "fused"
        return self.actor_world + (0 if shared else self.rollout_world)


def make_plan(config: MiniRLConfig) -> RunPlan:
    """Check the configuration; ConfigError or ComponentError in one line if it can't work."""
    check_values(config)
    check_algorithm(config)
    _check_nodes(config)
    device = detect_device(config.cluster.device)
    actor_world = _world(config.cluster.actor.n_gpus_per_node, config.cluster.actor.nnodes)
    rollout_world = _rollout_world(config, device, actor_world)
    _check_replicas(config, rollout_world)
    _check_batches(config, actor_world)
    model_path, embedded = resolve_model(config.actor.model_config.local_path)
    check_model(model_path, config)
    train_config = _train_config(config, model_path)
    rollout_values = rollout_config(config, model_path)
    trained = _check_backend(
        plugins.TRAIN_ENGINES, config.actor.engine_config.backend, train_config, "actor"
    )
    files = _check_files(trained)
    served = _check_backend(
        plugins.ROLLOUT_BACKENDS, config.rollout.name, rollout_values, "rollout"
    )
    _check_files(served)
    if isinstance(served, SupportsEngineCheck):
        served.check_engine(device)
    transfer_options = _transfer_options(config, model_path)
    plan = RunPlan(
        config=config,
        device=device,
        model_path=model_path,
        embedded_model=embedded,
        actor_world=actor_world,
        rollout_world=rollout_world,
        train_config=train_config,
        rollout_config=rollout_values,
        transfer_options=transfer_options,
        layout=live_layout(config, rollout_values, device),
    )
    if device == "cpu":
        engines = rollout_world if config.debug.train_only is None else 0
        parameters = files.num_parameters if isinstance(files, SupportsParameterCount) else 0
        check_memory(parameters, actor_world, engines, config)
    return plan


def _check_nodes(config: MiniRLConfig) -> None:
    if config.cluster.ray_address is not None:
        return
    for role in ("actor", "rollout"):
        nnodes = value_of(config, f"cluster.{role}.nnodes")
        if nnodes > 1:
            msg = (
                f"cluster.{role}.nnodes={nnodes}: the Ray that a run starts has one node; start "
                "a cluster and give its cluster.ray_address"
            )
            raise ConfigError(msg)


def _world(per_node: int | None, nnodes: int) -> int:
    return (per_node or 0) * nnodes


def _rollout_world(config: MiniRLConfig, device: str, actor_world: int) -> int:
    tp_size = config.rollout.tensor_model_parallel_size
    fused = config.cluster.mode == "fused"
    per_node = config.cluster.rollout.n_gpus_per_node
    if per_node is not None and per_node < 1:
        raise ConfigError(f"cluster.rollout.n_gpus_per_node={per_node}: must be at least 1")
    if per_node is None:
        world = actor_world if fused and device != "cpu" else tp_size
    else:
        world = _world(per_node, config.cluster.rollout.nnodes)
    pool = min(world, actor_world) if fused else world
    if tp_size > pool:
        owner = "actor" if fused else "rollout"
        msg = (
            f"rollout.tensor_model_parallel_size={tp_size} is larger than the pool of {pool} "
            f"devices; raise cluster.{owner}.n_gpus_per_node"
        )
        raise ConfigError(msg)
    if fused and (world > actor_world or (device != "cpu" and world != actor_world)):
        msg = (
            f"cluster.rollout.n_gpus_per_node={per_node}: in fused mode the {world} rollout ranks "
            f"share the devices of the {actor_world} actor ranks; leave it null"
        )
        raise ConfigError(msg)
    if world % tp_size:
        msg = (
            f"rollout.tensor_model_parallel_size={tp_size} does not divide the {world} rollout "
            "ranks into whole replicas"
        )
        raise ConfigError(msg)
    return world


def _check_replicas(config: MiniRLConfig, rollout_world: int) -> None:
    fused = config.cluster.mode == "fused"
    if fused and config.rollout.on_replica_failure == "continue":
        msg = (
            "rollout.on_replica_failure=continue: only in separate mode; in fused mode an engine "
            "shares its fate with the actor beside it"
        )
        raise ConfigError(msg)
    if fused and config.rollout.free_cache_engine and config.rollout.on_update != "abort":
        msg = (
            f"rollout.on_update={config.rollout.on_update}: in fused mode requests in flight end "
            "when the engine's memory goes to the actor; set rollout.free_cache_engine=false"
        )
        raise ConfigError(msg)
    wanted = config.rollout.min_replicas
    if wanted is None:
        return
    if fused:
        msg = f"rollout.min_replicas={wanted}: only in separate mode can replicas join later"
        raise ConfigError(msg)
    replicas = rollout_world // config.rollout.tensor_model_parallel_size
    if not 1 <= wanted <= replicas:
        msg = (
            f"rollout.min_replicas={wanted}: must be at least 1 and at most {replicas}, "
            "the number of replicas"
        )
        raise ConfigError(msg)


def _check_batches(config: MiniRLConfig, actor_world: int) -> None:
    fsdp_size = config.actor.engine_config.fsdp_size
    if actor_world % fsdp_size:
        msg = (
            f"actor.engine_config.fsdp_size={fsdp_size} does not divide the actor world of "
            f"{actor_world}; use a divisor of it, such as {_divisor(actor_world, fsdp_size)}"
        )
        raise ConfigError(msg)
    samples = config.data.train_batch_size * config.data.num_generations
    mini_batch = config.algorithm.ppo_mini_batch_size
    mini_batch = samples if mini_batch is None else mini_batch
    if mini_batch < 1 or samples % mini_batch or mini_batch % actor_world:
        msg = (
            f"algorithm.ppo_mini_batch_size={mini_batch} must divide the {samples} samples of a "
            f"step (data.train_batch_size x data.num_generations) and be a multiple of the "
            f"{actor_world} actor ranks"
        )
        raise ConfigError(msg)


def _divisor(world: int, wanted: int) -> int:
    return next(size for size in range(min(world, wanted), 0, -1) if world % size == 0)


def _train_config(config: MiniRLConfig, model_path: Path) -> dict[str, Any]:
    engine = asdict(config.actor.engine_config)
    engine.pop("backend")
    engine["wire_dtype"] = config.rollout.dtype
    algorithm = config.algorithm
    steps = config.trainer.total_training_steps
    optimizer = asdict(config.actor.optimizer_config)
    return {
        "model": {"local_path": str(model_path)},
        "engine": engine,
        "optimizer": {**optimizer, "total_training_steps": steps},
        "loss": {
            "loss_mode": algorithm.loss_mode,
            "clip_ratio": algorithm.clip_ratio,
            "clip_ratio_low": algorithm.clip_ratio_low,
            "clip_ratio_high": algorithm.clip_ratio_high,
            "kl_coef": algorithm.kl_coef,
            "entropy_coef": algorithm.entropy_coef,
            "loss_agg_mode": algorithm.loss_agg_mode,
            "loss_scale_factor": float(config.rollout.max_completion_length),
            "critic": algorithm.adv_estimator == "ppo",
            "vf_coef": algorithm.vf_coef,
            "cliprange_value": algorithm.cliprange_value,
            "ppo_epochs": algorithm.ppo_epochs,
            "ppo_mini_batch_size": algorithm.ppo_mini_batch_size,
        },
    }


def rollout_config(config: MiniRLConfig, model_path: Path) -> dict[str, Any]:
    """Values for the rollout backend's configuration class."""
    rollout = config.rollout
    if rollout.local_path not in (None, config.actor.model_config.local_path):
        served, _ = resolve_model(rollout.local_path, "rollout.local_path")
        check_same_model(model_path, served)
        model_path = served
    return {
        "local_path": str(model_path),
        "dtype": rollout.dtype,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "kv_cache_memory_gb": rollout.kv_cache_memory_gb,
        "free_cache_engine": rollout.free_cache_engine,
        "tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        "max_model_len": config.data.max_prompt_length + rollout.max_completion_length,
        "bucket_megabytes": config.checkpoint_engine.update_weights_bucket_megabytes,
        "engine_kwargs": rollout.engine_kwargs,
        "on_update": rollout.on_update,
        "start_timeout_s": rollout.start_timeout_s,
    }


def _transfer_options(config: MiniRLConfig, model_path: Path) -> dict[str, Any]:
    """Options of the checkpoint engine, checked, with what the configuration says elsewhere."""
    section = config.checkpoint_engine
    if config.cluster.mode == "fused":
        _check_unused(section)
        return {}
    backend = _load(plugins.CHECKPOINT_ENGINES, section.backend, "checkpoint_engine.backend")
    config_cls = plugins.load_object(backend.config_cls)
    known = {item.name for item in fields(config_cls)}
    common = {"root_dir": section.root_dir, "model_dir": str(model_path)}
    given = {key: value for key, value in common.items() if key in known}
    options = {**given, **section.options}
    typed = plugins.build_config(config_cls, options, "checkpoint_engine.options")
    if isinstance(typed, SupportsFileCheck):
        try:
            typed.check_files()
        except ConfigError as error:
            raise ConfigError(f"checkpoint_engine.{error}") from error
    return options


def _check_unused(section: CheckpointEngineConfig) -> None:
    """In fused mode the backend may be one that is not installed, but no unknown one."""
    if section.options:
        raise ConfigError("checkpoint_engine.options: fused mode has no checkpoint engine")
    group = plugins.CHECKPOINT_ENGINES
    known = {name for kind, name in plugins.KNOWN_PROVIDERS if kind == group}
    if section.backend not in known:
        _load(group, section.backend, "checkpoint_engine.backend")


def _check_backend(group: str, name: str, values: dict[str, Any], where: str) -> Any:
    """The backend's own configuration."""
    backend = _load(group, name, f"{where}.{_NAME_KEYS[group]}")
    return plugins.build_config(plugins.load_object(backend.config_cls), values, where)


def _check_files(config: Any) -> object:
    """What a backend found in its files; None if it does not look."""
    return config.check_files() if isinstance(config, SupportsFileCheck) else None


def _load(group: str, name: str, where: str) -> Any:
    try:
        return plugins.load_backend(group, name)
    except ComponentNotFoundError as error:
        raise ConfigError(f"{where}: {error}") from error
