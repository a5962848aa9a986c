"""What can be set, checked when it is constructed. No torch is imported here.

`FsdpConfig` has four sections. A plain nested mapping becomes one with
`rl_core.plugins.build_config(FsdpConfig, {"model": {...}, ...}, "actor")`, which also refuses
unknown keys and wrong types.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rl_core.errors import ConfigError
from rl_train_fsdp.model_directory import ModelDirectory

ComputeDtype = Literal["float32", "bfloat16"]
Schedule = Literal["constant", "linear", "cosine"]
LossMode = Literal["vanilla", "gspo"]
LossAggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]

_WIRE_DTYPES = ("float32", "bfloat16", "float16")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_positive(**values: float | None) -> None:
    """Each value must be a finite number above 0; None stands for "not set"."""
    for name, value in values.items():
        wrong = value is not None and not (math.isfinite(value) and value > 0)
        _require(not wrong, f"{name} must be greater than 0, not {value}")


def _require_not_negative(**values: float) -> None:
    """Each value must be a finite number, 0 or more."""
    for name, value in values.items():
        _require(math.isfinite(value) and value >= 0, f"{name} must be 0 or more, not {value}")


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    local_path: str = ""
    """Hugging Face directory with config.json and safetensors files. Nothing is downloaded, and
    no code in the directory is run."""

    def __post_init__(self) -> None:
        _require(bool(self.local_path), "local_path is empty; give a Hugging Face model directory")


@dataclass(frozen=True)
class EngineConfig:
    """How the model is spread over the ranks and computed."""

    fsdp_size: int = 1
    """Ranks that share one copy of the parameters. It divides the world size; where it is
    smaller, the copies are kept equal by an all-reduce of the gradients (HSDP)."""

    dtype: ComputeDtype = "bfloat16"
    """Dtype of forward and backward. Parameters, gradients and optimizer state are float32
    whatever is set here."""

    wire_dtype: str | None = None
    """Dtype in which floating tensors leave `get_per_tensor_param` and `save_pretrained`:
    the rollout engine's. None sends the float32 parameters as they are. Tensors that the model
    directory stores wider than the model's own dtype (a float32 router) are sent that wide."""

    param_offload: bool = False
    """Keep parameters in host memory while `offload()` is in force. Accelerators only."""

    optimizer_offload: bool = False
    """Keep optimizer state in host memory while `offload()` is in force. Accelerators only."""

    gradient_checkpointing: bool = False
    """Recompute activations layer by layer in the backward pass instead of keeping them."""

    ppo_max_token_len_per_gpu: int = 16384
    """Upper bound of tokens, padding included, in one forward pass of one rank. A single longer
    sequence is run alone."""

    share_prefixes: bool = True
    """Compute a prompt once for all samples of a micro-batch that begin with it, where that is
    less work and the model's attention allows it (a log line says if not). Log-probabilities
    and gradients are those of the samples apart, up to rounding."""

    reshard_after_forward: bool | None = None
    """Free the gathered parameters after each layer's forward and reduce the gradients of each
    micro-batch at once: least memory, most communication. False keeps full parameters and
    full gradients during an update. None: False on cpu, True elsewhere."""

    timeout_s: float = 600.0
    """Longest wait for the other ranks, in start-up and in every collective."""

    def __post_init__(self) -> None:
        _require_positive(
            fsdp_size=self.fsdp_size,
            ppo_max_token_len_per_gpu=self.ppo_max_token_len_per_gpu,
            timeout_s=self.timeout_s,
        )
        known = self.wire_dtype is None or self.wire_dtype in _WIRE_DTYPES
        _require(known, f"wire_dtype {self.wire_dtype!r} is none of {', '.join(_WIRE_DTYPES)}")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) and its learning-rate schedule."""

    lr: float = 1e-5
    """Peak learning rate. 0 leaves every weight bit-equal."""

    lr_scheduler_type: Schedule = "constant"
    """How the rate moves after warm-up. One step of the schedule is one `update_policy`."""

    min_lr_ratio: float = 0.1
    """Rate at `total_training_steps`, as a share of `lr` (linear and cosine)."""

    warmup_steps: int = 0
    """The rate rises linearly over so many steps; the first one trains at lr / warmup_steps. A
    training that is shorter ends while it rises."""

    total_training_steps: int | None = None
    """Where linear and cosine decay end. Needed by these two, ignored by constant."""

    weight_decay: float = 0.0
    """Decoupled weight decay, applied to every parameter."""

    max_grad_norm: float = 1.0
    """Gradients of a larger L2 norm, over all parameters and ranks, are scaled down to it."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moments."""

    def __post_init__(self) -> None:
        _require_not_negative(
            lr=self.lr, weight_decay=self.weight_decay, warmup_steps=self.warmup_steps
        )
        _require_positive(
            max_grad_norm=self.max_grad_norm, total_training_steps=self.total_training_steps
        )
        _require(0 <= self.min_lr_ratio <= 1, f"min_lr_ratio {self.min_lr_ratio} is not in [0, 1]")
        _require(all(0 <= b < 1 for b in self.betas), f"betas {self.betas} are not in [0, 1)")
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.lr_scheduler_type == "constant":
            return
        message = f"lr_scheduler_type {self.lr_scheduler_type} needs total_training_steps"
        _require(self.total_training_steps is not None, message)


@dataclass(frozen=True)
class LossConfig:
    """What is minimised, and in how many steps. Sources of the formulas: `losses`."""

    loss_mode: LossMode = "vanilla"
    """`vanilla`: the probability ratio of each token (PPO, GRPO). `gspo`: that of its whole
    sequence, which needs `seq-mean-token-mean`."""

    clip_ratio: float = 0.2
    """PPO's epsilon: the probability ratio counts within [1 - clip_ratio, 1 + clip_ratio]."""

    clip_ratio_low: float | None = None
    """Another epsilon for the lower bound; None takes `clip_ratio`."""

    clip_ratio_high: float | None = None
    """Another epsilon for the upper bound (DAPO's clip-higher); None takes `clip_ratio`."""

    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy, reference); above 0 every sample must carry
    reference log-probabilities."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    loss_agg_mode: LossAggregation = "token-mean"
    """`token-mean`: mean over all loss tokens of the mini-batch. `seq-mean-token-mean`: mean over
    sequences of each one's mean. `seq-mean-token-sum`: mean over sequences of each one's sum.
    `seq-mean-token-sum-norm`: the same over the constant `loss_scale_factor` (Dr. GRPO)."""

    loss_scale_factor: float | None = None
    """Divisor of `seq-mean-token-sum-norm`, commonly the longest response allowed."""

    critic: bool = False
    """Give the policy a value head, and train it along: PPO's critic on the policy's own layers."""

    vf_coef: float = 0.1
    """Weight of the value loss, with `critic`."""

    cliprange_value: float = 0.2
    """A value counts within so much of what it was before the update, with `critic`."""

    ppo_epochs: int = 1
    """Passes over the samples of one `update_policy`."""

    ppo_mini_batch_size: int | None = None
    """Samples, over all ranks, per optimizer step. None takes one step on all of them."""

    def __post_init__(self) -> None:
        _require_positive(
            clip_ratio=self.clip_ratio,
            ppo_epochs=self.ppo_epochs,
            ppo_mini_batch_size=self.ppo_mini_batch_size,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            loss_scale_factor=self.loss_scale_factor,
            vf_coef=self.vf_coef,
            cliprange_value=self.cliprange_value,
        )
        _require_not_negative(kl_coef=self.kl_coef, entropy_coef=self.entropy_coef)
        self._check_mode()

    def _check_mode(self) -> None:
        mode = self.loss_agg_mode
        if self.loss_mode == "gspo":
            message = f"loss_mode gspo needs loss_agg_mode seq-mean-token-mean, not {mode}"
            _require(mode == "seq-mean-token-mean", message)
        if mode == "seq-mean-token-sum-norm":
            _require(self.loss_scale_factor is not None, f"{mode} needs loss_scale_factor")

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Lowest and highest probability ratio that counts."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return 1.0 - low, 1.0 + high


@dataclass(frozen=True)
class FsdpConfig:
    """Everything that `FsdpTrainEngine` can be told."""

    model: ModelConfig
    """Which model is trained."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """How it is spread over the ranks and computed."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule."""

    loss: LossConfig = field(default_factory=LossConfig)
    """What is minimised, and in how many steps."""

    def check_files(self) -> ModelDirectory:
        """Check the model directory by its JSON and safetensors headers alone.

        Takes milliseconds and imports no torch, so that the program which starts the ranks can
        call it first. ConfigError names the file and what to do about it.
        """
        return ModelDirectory.open(Path(self.model.local_path))

    def check_world(self, world_size: int) -> None:
        """ConfigError unless `engine.fsdp_size` divides the number of actor ranks."""
        size = self.engine.fsdp_size
        message = f"fsdp_size {size} does not divide the number of actor ranks, {world_size}"
        _require(world_size % size == 0, message)
