"""What each single value of the configuration may be, whatever the others are."""

import math
from dataclasses import asdict
from typing import Any

from minirl.config import MiniRLConfig
from minirl.config_keys import value_of
from minirl.prompt_length import POLICIES
from minirl.prompts import TASKS
from minirl.reporters import check_reporters
from minirl.task_file import is_task_file
from rl_core.errors import ConfigError
from rl_core.metadata import nearest

CHOICES: dict[str, tuple[str, ...]] = {
    "cluster.mode": ("fused", "separate"),
    "cluster.device": ("auto", "cpu", "cuda", "npu"),
    "actor.engine_config.dtype": ("float32", "bfloat16"),
    "actor.optimizer_config.lr_scheduler_type": ("constant", "linear", "cosine"),
    "rollout.dtype": ("float32", "bfloat16", "float16"),
    "rollout.on_replica_failure": ("abort", "continue"),
    "rollout.on_update": ("abort", "wait", "keep"),
    "algorithm.adv_estimator": ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "ppo"),
    "algorithm.loss_mode": ("vanilla", "gspo"),
    "algorithm.loss_agg_mode": (
        "token-mean",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
    ),
    "algorithm.rollout_correction.rollout_is": ("token", "sequence"),
    "data.on_long_prompt": POLICIES,
    "checkpoint_engine.debug.verify_replicas": ("first", "all"),
}
_AT_LEAST: dict[str, float] = {
    "cluster.actor.n_gpus_per_node": 1,
    "cluster.actor.nnodes": 1,
    "cluster.rollout.nnodes": 1,
    "checkpoint_engine.update_weights_bucket_megabytes": 0.001,
    "actor.engine_config.fsdp_size": 1,
    "actor.engine_config.ppo_max_token_len_per_gpu": 1,
    "actor.optimizer_config.lr": 0,
    "actor.optimizer_config.warmup_steps": 0,
    "actor.optimizer_config.weight_decay": 0,
    "rollout.tensor_model_parallel_size": 1,
    "rollout.max_completion_length": 1,
    "trainer.seed": 0,
    "trainer.total_training_steps": 1,
    "trainer.sync_freq": 1,
    "trainer.save_freq": 0,
    "trainer.keep_last": 1,
    "algorithm.ppo_epochs": 1,
    "algorithm.kl_coef": 0,
    "algorithm.entropy_coef": 0,
    "algorithm.gamma": 0,
    "algorithm.lam": 0,
    "algorithm.filter_groups.max_num_gen_batches": 1,
    "reward.overlong_buffer.penalty_factor": 0,
    "checkpoint_engine.debug.verify_every": 1,
    "checkpoint_engine.debug.keep_last": 1,
    "data.train_batch_size": 1,
    "data.num_generations": 1,
    "data.eval_size": 0,
    "data.max_prompt_length": 1,
}
_POSITIVE = (
    "actor.optimizer_config.max_grad_norm",
    "rollout.temperature",
    "rollout.start_timeout_s",
    "rollout.generate_timeout_s",
    "rollout.stall_timeout_s",
    "checkpoint_engine.timeout_s",
    "checkpoint_engine.debug.perturb_delta",
    "algorithm.clip_ratio",
    "algorithm.clip_ratio_low",
    "algorithm.clip_ratio_high",
    "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.vf_coef",
    "algorithm.cliprange_value",
    "reward.timeout_s",
)


def check_values(config: MiniRLConfig) -> None:
    """ConfigError or ComponentError, one line, for the first value that can't be."""
    _check_choices(config)
    check_reporters(config.trainer.report_to)
    _check_halves(config)
    _check_finite(asdict(config), "")
    _check_bounds(config)
    if config.trainer.seed >= 1 << 32:
        raise ConfigError(f"trainer.seed={config.trainer.seed}: must be below 2^32")
    if not 0 < config.rollout.top_p <= 1:
        raise ConfigError(f"rollout.top_p={config.rollout.top_p}: must be in (0, 1]")
    if config.rollout.top_k != -1 and config.rollout.top_k < 1:
        raise ConfigError(f"rollout.top_k={config.rollout.top_k}: must be -1 (no limit) or >= 1")


def _check_choices(config: MiniRLConfig) -> None:
    for key, choices in CHOICES.items():
        value = value_of(config, key)
        if value is not None:
            _check_choice(key, value, choices)
    if not is_task_file(config.data.task):
        _check_choice("data.task", config.data.task, TASKS)


def _check_halves(config: MiniRLConfig) -> None:
    halves = {
        "debug.rollout_only": config.debug.rollout_only,
        "debug.train_only": config.debug.train_only is not None,
        "trainer.mock": config.trainer.mock,
    }
    given = [name for name, is_given in halves.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other; give one")
    if given and config.trainer.resume is not None:
        raise ConfigError(f"trainer.resume={config.trainer.resume}: not with {given[0]}")
    if config.debug.train_only is not None and config.trainer.save_freq:
        msg = f"trainer.save_freq={config.trainer.save_freq}: debug.train_only saves the model only"
        raise ConfigError(msg)
    if config.debug.train_only is not None and config.algorithm.filter_groups.enable:
        msg = "algorithm.filter_groups.enable=true: debug.train_only cannot ask further prompts"
        raise ConfigError(msg)


def _check_bounds(config: MiniRLConfig) -> None:
    for key, bound in _AT_LEAST.items():
        value = value_of(config, key)
        if value is None or value < bound:
            raise ConfigError(f"{key}={value}: must be at least {bound:g}")
    for key in _POSITIVE:
        value = value_of(config, key)
        if value is not None and value <= 0:
            raise ConfigError(f"{key}={value}: must be greater than 0")


def _check_finite(node: Any, key: str) -> None:
    if isinstance(node, float) and not math.isfinite(node):
        raise ConfigError(f"{key}={node}: must be a finite number")
    if isinstance(node, list):
        for item in node:
            _check_finite(item, key)
    if isinstance(node, dict):
        for name, value in node.items():
            _check_finite(value, f"{key}.{name}" if key else str(name))


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        known = ", ".join(choices)
        msg = f"{key}={value}: must be one of {known}; the nearest is {nearest(value, choices)}"
        raise ConfigError(msg)
