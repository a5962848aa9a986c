"""The settings that every replica has: the `rollout` section of the configuration."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from rl_core.errors import ConfigError, IncompatibleVersionError
from rl_core.interfaces import PauseMode
from rl_core.metadata import DTYPE_BYTES, nearest
from rl_core.rollout.installed_engine import InstalledEngine
from rl_core.rollout.kv_room import bytes_per_token, every_token_is_kept

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_CPU_KV_GB = 0.25
ON_UPDATE = (PauseMode.ABORT.value, PauseMode.WAIT.value, PauseMode.KEEP.value)
"""Of the pause modes, those that leave no KV of an older version in use."""


@dataclass(frozen=True)
class EngineConfig:
    """How a replica's engine is started and fed; each backend adds what its engine has more.

    Attributes:
        own_engine_args: engine arguments that the backend sets itself, with the setting to use
            instead ('' for none).
        distribution: the backend's package, for messages.
        engine: what the backend says of its engine, for checks that do not import it; None if it
            says nothing.

    Errors: ConfigError from the constructor, naming the key.
    """

    own_engine_args: ClassVar[Mapping[str, str]] = {}
    distribution: ClassVar[str] = "the rollout backend"
    engine: ClassVar[InstalledEngine | None] = None

    local_path: str
    """Hugging Face directory: `config.json`, and the tokenizer where HTTP clients send text."""

    dtype: str = "bfloat16"
    """Precision of the engine's weights and activations: float32, bfloat16 or float16."""

    tensor_model_parallel_size: int = 1
    """Ranks of the engine."""

    gpu_memory_utilization: float = 0.6
    """Share of a device's memory for the engine. Not passed on cpu, where engines take it
    as a share of all memory of the machine."""

    kv_cache_memory_gb: float | None = None
    """KV cache of each engine rank, in GiB. None: 0.25 on cpu; elsewhere what
    `gpu_memory_utilization` leaves."""

    free_cache_engine: bool = True
    """Whether `release` frees memory; False makes it free nothing."""

    max_model_len: int | None = None
    """Longest sequence, prompt and completion together, in tokens; None: the model's own."""

    seed: int = 0
    """Seed of requests that bring none."""

    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, passed through untouched; they win over ours."""

    start_timeout_s: float = 600.0
    """Seconds for the server to come up."""

    bucket_megabytes: float = 2048.0
    """Size of a transfer bucket, in MiB; never more than the payload is allocated."""

    load_path: Literal["auto", "bracketed", "plain"] = "auto"
    """How weights enter the engine: `bracketed` opens the engine's own update session,
    `plain` calls `model.load_weights`, for engines without one. `auto` takes the first that the
    engine has."""

    load_format: Literal["dummy", "auto"] = "dummy"
    """`dummy`: the engine starts without reading weights, since the first sync brings all of
    them and nothing is served before it. `auto`: read the checkpoint (costs its loading time)."""

    start_method: Literal["auto", "fork", "spawn"] = "auto"
    """How the engine's processes are started. `auto`: fork on cpu, where it saves importing the
    engine a second time, else spawn."""

    cpu_threads: int | None = None
    """Compute threads of each engine rank on cpu; None: the allowed cores, shared by the ranks."""

    check_finite: bool = True
    """Refuse a version that contains NaN or infinity."""

    on_update: Literal["abort", "wait", "keep"] = "abort"
    """What happens to requests in flight when an update begins: they end with what they have, are
    waited for, or go on afterwards under the new version, from an empty KV cache."""

    log_dir: str | None = None
    """Directory for the engine's own output, one file per process; None leaves it on stderr."""

    log_level: str = "WARNING"
    """Level of the engine's own log."""

    def __post_init__(self) -> None:
        self._check_values()
        self._check_ranges()
        self._check_model()
        for key in self.engine_kwargs:
            if key in self.own_engine_args:
                instead = self.own_engine_args[key]
                hint = f"; set rollout.{instead} instead" if instead else ""
                msg = f"rollout.engine_kwargs.{key} is set by {self.distribution} itself{hint}"
                raise ConfigError(msg)

    def _check_values(self) -> None:
        if self.dtype not in DTYPES:
            hint = nearest(self.dtype, DTYPES if self.dtype not in DTYPE_BYTES else ["bfloat16"])
            msg = f"rollout.dtype={self.dtype!r} is not one of {', '.join(DTYPES)}; try {hint!r}"
            raise ConfigError(msg)

        if self.on_update not in ON_UPDATE:
            known = ", ".join(ON_UPDATE)
            msg = f"rollout.on_update={self.on_update!r} is not one of {known}"
            raise ConfigError(msg)

    def _check_ranges(self) -> None:
        positive = {
            "tensor_model_parallel_size": self.tensor_model_parallel_size,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_gb": self.kv_cache_memory_gb,
            "max_model_len": self.max_model_len,
            "start_timeout_s": self.start_timeout_s,
            "bucket_megabytes": self.bucket_megabytes,
            "cpu_threads": self.cpu_threads,
        }
        for key, value in positive.items():
            if value is not None and value <= 0:
                raise ConfigError(f"rollout.{key}={value} must be positive")
            if value is not None and not math.isfinite(value * (1 << 30)):
                raise ConfigError(f"rollout.{key}={value} is too large")
        if self.gpu_memory_utilization > 1:
            msg = f"rollout.gpu_memory_utilization={self.gpu_memory_utilization} exceeds 1"
            raise ConfigError(msg)

    def _check_model(self) -> None:
        if not (Path(self.local_path) / "config.json").is_file():
            msg = f"rollout.local_path={self.local_path!r} is no model: it has no config.json"
            raise ConfigError(msg)

    def check_engine(self, device: str) -> None:
        """Compare with the engine that is installed here, without importing it.

        Errors: ConfigError (an engine argument or a size that cannot work),
        IncompatibleVersionError (the engine is too old).
        """
        self._check_kv_room(device)
        if self.engine is not None:
            self.engine.check_version()
            self.engine.check_arguments(self.engine_kwargs)

    def _check_kv_room(self, device: str) -> None:
        """One sequence of full length must fit, where it is known what it takes."""
        nbytes, length = self.kv_cache_bytes(device), self.max_model_len
        model = self.text_model()
        unknown = "kv_cache_dtype" in self.engine_kwargs or not every_token_is_kept(model)
        if nbytes is None or length is None or unknown:
            return
        try:
            each = bytes_per_token(model, self.dtype, self.tensor_model_parallel_size)
        except KeyError:
            return
        if nbytes < length * each:
            given = self.kv_cache_memory_gb
            msg = (
                f"rollout.kv_cache_memory_gb={DEFAULT_CPU_KV_GB if given is None else given}: "
                f"{nbytes // each} tokens fit, one sequence may have {length}; "
                f"set {length * each / (1 << 30):.2g} or more"
            )
            raise ConfigError(msg)

    def text_model(self) -> dict[str, Any]:
        """What the model's `config.json` says of its language model."""
        content = json.loads((Path(self.local_path) / "config.json").read_text())
        found: dict[str, Any] = content.get("text_config", content)
        return found

    def kv_cache_bytes(self, device: str) -> int | None:
        """Bytes of KV cache for each engine rank; None where the engine decides."""
        gigabytes = self.kv_cache_memory_gb
        if gigabytes is None:
            if device != "cpu":
                return None
            gigabytes = DEFAULT_CPU_KV_GB
        return int(gigabytes * (1 << 30))


def choose_load_path(wanted: str, missing: str | None) -> Literal["bracketed", "plain"]:
    """The load path to use, for a configured one of `auto`, `bracketed` or `plain`.

    Args:
        wanted: the setting.
        missing: what the installed engine lacks for `bracketed`, or None if it can do it.

    Errors: IncompatibleVersionError if `bracketed` is wanted and the engine cannot do it.
    """
    if wanted == "plain" or (wanted == "auto" and missing is not None):
        return "plain"
    if missing is not None:
        raise IncompatibleVersionError(f"{missing}; set rollout.load_path=plain")
    return "bracketed"
