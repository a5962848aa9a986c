"""The configuration: schema ← embedded defaults ← presets ← command line.

The dataclasses below are the whole schema; a key exists only once it works. `load_config` merges
the layers with OmegaConf and turns every mistake into one line (`ConfigError`).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from minirl.algorithm_config import AlgorithmConfig
from minirl.config_keys import expand_home, refuse_values
from minirl.debug_config import DebugConfig, LoopDebugConfig
from minirl.task_config import DataConfig, RewardConfig
from rl_core.errors import ConfigError, in_one_line
from rl_core.metadata import nearest

PRESETS = Path(__file__).parent / "configs"
_OPEN_KEYS = ("rollout.engine_kwargs", "checkpoint_engine.options", "data.reasoning_gym")


@dataclass
class PoolConfig:
    """Devices of one role; on cpu a device is a worker process ("slot")."""

    n_gpus_per_node: int | None = 2
    """Devices per node. For the rollout in fused mode null means the actor's, and on cpu as many
    as one replica needs."""
    nnodes: int = 1


@dataclass
class ClusterConfig:
    """Where things run."""

    mode: str = "fused"
    ray_address: str | None = None
    """Address of a running Ray cluster to join; null starts a local one."""
    device: str = "auto"
    """auto | cpu | cuda | npu."""
    actor: PoolConfig = field(default_factory=PoolConfig)
    rollout: PoolConfig = field(default_factory=PoolConfig)


@dataclass
class ModelConfig:
    """The policy."""

    local_path: str | None = None
    """Hugging Face directory; null is the embedded model."""


@dataclass
class EngineConfig:
    """How the policy is trained."""

    backend: str = "fsdp2"
    fsdp_size: int = 2
    """Ranks that share one copy of the parameters; divides the actor world."""
    dtype: str = "bfloat16"
    """Compute dtype; parameters and optimizer state are kept in float32."""
    param_offload: bool = False
    optimizer_offload: bool = False
    gradient_checkpointing: bool = False
    ppo_max_token_len_per_gpu: int = 16384
    """Tokens, padding included, of one micro-batch."""
    share_prefixes: bool = True
    """Compute a group's prompt once in training, where the model's attention allows it."""


@dataclass
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = 1e-5
    lr_scheduler_type: str = "constant"
    """constant | linear | cosine (down to 10 %)."""
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass
class ActorConfig:
    """The training side."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    engine_config: EngineConfig = field(default_factory=EngineConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class RolloutConfig:
    """The serving side."""

    name: str = "vllm"
    local_path: str | None = "${actor.model_config.local_path}"
    dtype: str = "bfloat16"
    gpu_memory_utilization: float = 0.6
    """Share of a device's memory; not passed on where the device is a cpu."""
    kv_cache_memory_gb: float | None = None
    """KV cache of one engine rank in GiB; null leaves it to the engine, 0.25 on cpu."""
    free_cache_engine: bool = True
    """Free the engine's memory while the actor trains, if a weight sync follows."""
    tensor_model_parallel_size: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_completion_length: int = 512
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the engine as they are."""
    start_timeout_s: float = 600.0
    min_replicas: int | None = None
    """Separate mode: begin as soon as so many replicas answer; null waits for all."""
    on_replica_failure: str = "abort"
    """abort | continue (separate mode: without the replica that failed, while there are others)."""
    generate_timeout_s: float = 3600.0
    """Deadline of what a replica is asked to generate at once."""
    stall_timeout_s: float = 300.0
    """A replica that owes tokens and makes none for so long has failed."""
    on_update: str = "abort"
    """abort | wait | keep: what happens to requests in flight when a weight sync begins."""


@dataclass
class CheckpointEngineConfig:
    """How weights travel."""

    update_weights_bucket_megabytes: float = 2048.0
    backend: str = "hccl"
    """Checkpoint engine of separate mode: hccl | mooncake | disk | any installed one."""
    root_dir: str = "/tmp/minirl_checkpoint"
    """Directory for what is exchanged on disk."""
    options: dict[str, Any] = field(default_factory=dict)
    """The checkpoint engine's own keys."""
    timeout_s: float = 600.0
    """Deadline of one weight sync."""
    debug: DebugConfig = field(default_factory=DebugConfig)


@dataclass
class TrainerConfig:
    """The loop."""

    seed: int = 1
    total_training_steps: int = 90
    sync_freq: int = 1
    """Sync weights after every n-th step; the last step is always followed by one."""
    run_dir: str | None = None
    """Output directory; null is runs/<time>."""
    resume: str | None = None
    """auto: go on from the newest checkpoint of `run_dir` (null: of the newest run in runs/), or
    begin if there is none. Or the path of a checkpoint, or of a run."""
    save_freq: int = 0
    """Save a training checkpoint every n-th step; 0 never."""
    keep_last: int = 2
    """Training checkpoints kept."""
    mock: bool = False
    """Sleep instead of generating and training; everything else is real."""
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, names of entry points."""


@dataclass
class MiniRLConfig:
    """Everything."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    debug: LoopDebugConfig = field(default_factory=LoopDebugConfig)


def load_config(arguments: Sequence[str]) -> MiniRLConfig:
    """The configuration that `key=value` arguments describe.

    Args:
        arguments: `config=NAME[,NAME]` picks presets (or YAML files), the rest are overrides.

    Errors: ConfigError, one line that names the key, the value and the nearest valid one.
    """
    try:
        return _load(arguments)
    except RecursionError as error:
        raise ConfigError("the configuration is nested too deeply") from error


def _load(arguments: Sequence[str]) -> MiniRLConfig:
    presets = None
    overrides = []
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator:
            raise ConfigError(f"not key=value: {argument!r}")
        if key == "config":
            if presets is not None:
                both = f"{presets},{value}"
                raise ConfigError(f"config= is given twice; to merge both, give config={both}")
            presets = value
        else:
            overrides.append(argument)
    merged = OmegaConf.structured(MiniRLConfig)
    for name in ("embedded", *("fused" if presets is None else presets).split(",")):
        merged = _merge(merged, _read_preset(name), f"config={name}")
    for override in overrides:
        merged = _merge(merged, _read_override(override), _printable(override))
    try:
        OmegaConf.resolve(merged)
        config: MiniRLConfig = OmegaConf.to_object(merged)  # type: ignore[assignment]
        OmegaConf.structured(config)  # merging lets pass what is in lists
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{key}{_one_line(error)}") from error
    expand_home(config)
    return config


def as_yaml(config: MiniRLConfig) -> str:
    """The resolved configuration, for `config.yaml`."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)


def _read_preset(name: str) -> DictConfig:
    is_path = name.endswith((".yaml", ".yml"))
    path = Path(os.path.expanduser(name)) if is_path else PRESETS / f"{name}.yaml"
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
        msg = f"config={name}: no such preset; known: {', '.join(known)} (or a path to a .yaml)"
        raise ConfigError(msg) from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"config={name}{_place(error)}: {_one_line(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"config={name}: the file holds no mapping")
    return loaded


def _read_override(override: str) -> DictConfig:
    try:
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, IndexError) as error:
        # ValueError for bytes that are no text and endless numbers, IndexError for "[=".
        raise ConfigError(f"{_printable(override)}: {_one_line(error)}") from error


def _merge(base: DictConfig, layer: DictConfig, source: str) -> DictConfig:
    known = dict.fromkeys(_known_keys(MiniRLConfig))
    given = cast("dict[str, Any]", OmegaConf.to_container(layer))
    for key in _given_keys(given, ""):
        if key not in known and not key.startswith(tuple(f"{name}." for name in _OPEN_KEYS)):
            hint = nearest(key, known)
            raise ConfigError(f"{source}: unknown key {_printable(key)}; the nearest is {hint}")
    refuse_values(given, source)
    _refuse_odd_names(given, source)
    _refuse_numbers(MiniRLConfig, given, source)
    _check_reward_path(given.get("reward"), source)
    data = given.get("data")
    problem = data.get("reasoning_gym") if isinstance(data, Mapping) else None
    if not isinstance(problem, str | Mapping | None):
        msg = f"{source}: data.reasoning_gym must be a name or a mapping with a key name"
        raise ConfigError(msg)
    if isinstance(problem, str) or (problem is not None and "name" in problem):
        # Another data set has other options: it replaces a preset's instead of merging with it.
        base = base.copy()
        base.data.reasoning_gym = None
    try:
        merged = OmegaConf.merge(base, layer)
    except (OmegaConfBaseException, TypeError) as error:  # TypeError for a list as a mapping
        raise ConfigError(f"{source}: {_one_line(error)}") from error
    return merged  # type: ignore[return-value]


def _check_reward_path(section: Any, source: str) -> None:
    path = section.get("path") if isinstance(section, Mapping) else None
    entries = path if isinstance(path, list) else [path]
    known = path is None or all(isinstance(entry, str) for entry in entries)
    if path == [] or not known:
        raise ConfigError(f"{source}: reward.path must be FILE.py, FILE.py:NAME or a list of them")


def _refuse_odd_names(given: Mapping[str, Any], source: str) -> None:
    """What becomes keyword arguments has texts as names."""
    for key in _OPEN_KEYS:
        section, name = key.split(".")
        values = given.get(section)
        inner = values.get(name) if isinstance(values, Mapping) else None
        names = inner if isinstance(inner, Mapping) else ()
        odd = [item for item in names if not isinstance(item, str)]
        if odd:
            raise ConfigError(f"{source}: {key}: the key {odd[0]} is no text")


def _refuse_numbers(cls: Any, given: Any, source: str) -> None:
    """OmegaConf takes every number but 0 for true."""
    for item in fields(cls):
        value = given.get(item.name) if isinstance(given, Mapping) else None
        if is_dataclass(item.type):
            _refuse_numbers(item.type, value, source)
        elif item.type is bool and type(value) is int and value not in (0, 1):
            raise ConfigError(f"{source}: {item.name} must be true or false, not {value}")


def _known_keys(cls: Any, prefix: str = "") -> Iterator[str]:
    for item in fields(cls):
        key = f"{prefix}{item.name}"
        yield key
        if is_dataclass(item.type):
            yield from _known_keys(item.type, f"{key}.")


def _given_keys(node: Any, prefix: str) -> Iterator[str]:
    if not isinstance(node, Mapping):
        return
    for name, value in node.items():
        key = f"{prefix}{name}"
        yield key
        if key not in _OPEN_KEYS:
            yield from _given_keys(value, f"{key}.")


def _place(error: Exception) -> str:
    """`:LINE` where a YAML error says it."""
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark is not None else ""


def _one_line(error: Exception) -> str:
    return _printable(in_one_line(error))


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)
