"""Which parts of an algorithm go together."""

from minirl.algorithm_config import AlgorithmConfig
from minirl.config import MiniRLConfig
from rl_core.errors import ConfigError

_GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo")
_CRITIC_KEYS = ("gamma", "lam", "vf_coef", "cliprange_value")


def check_algorithm(config: MiniRLConfig) -> None:
    """ConfigError, one line, for the first pair of keys that contradict each other."""
    algorithm, copies = config.algorithm, config.data.num_generations
    estimator = algorithm.adv_estimator
    if estimator in _GROUP_ESTIMATORS and copies < 2:
        msg = (
            f"algorithm.adv_estimator={estimator} compares samples of one prompt, "
            f"data.num_generations={copies} gives nothing to compare: all advantages would be 0"
        )
        raise ConfigError(msg)
    if not algorithm.norm_adv_by_std and estimator not in ("grpo", "dr_grpo"):
        msg = (
            f"algorithm.norm_adv_by_std=false: is a setting of adv_estimator=grpo; {estimator} "
            "has its own scale"
        )
        raise ConfigError(msg)
    if algorithm.loss_mode == "gspo" and algorithm.loss_agg_mode != "seq-mean-token-mean":
        msg = (
            f"algorithm.loss_mode=gspo is a mean over sequences; set algorithm.loss_agg_mode="
            f"seq-mean-token-mean instead of {algorithm.loss_agg_mode}"
        )
        raise ConfigError(msg)
    _check_critic(algorithm)
    if algorithm.filter_groups.enable and copies < 2:
        msg = (
            f"algorithm.filter_groups.enable=true keeps groups whose rewards differ; with "
            f"data.num_generations={copies} there are none"
        )
        raise ConfigError(msg)
    _check_overlong(config)


def _check_critic(algorithm: AlgorithmConfig) -> None:
    if algorithm.adv_estimator != "ppo":
        for name in _CRITIC_KEYS:
            value = getattr(algorithm, name)
            if value != getattr(AlgorithmConfig, name):
                msg = f"algorithm.{name}={value}: is for the critic of adv_estimator=ppo"
                raise ConfigError(f"{msg}, not for {algorithm.adv_estimator}")
        return
    for name in ("gamma", "lam"):
        value = getattr(algorithm, name)
        if value > 1:
            raise ConfigError(f"algorithm.{name}={value}: must be between 0 and 1")
    if algorithm.loss_mode == "gspo":
        msg = (
            "algorithm.loss_mode=gspo: has one ratio and one advantage for a whole response; "
            "adv_estimator=ppo has an advantage for each token"
        )
        raise ConfigError(msg)


def _check_overlong(config: MiniRLConfig) -> None:
    buffer, longest = config.reward.overlong_buffer, config.rollout.max_completion_length
    if buffer.enable and not 1 <= buffer.len <= longest:
        msg = (
            f"reward.overlong_buffer.len={buffer.len}: must be at least 1 and at most "
            f"rollout.max_completion_length={longest}, since it ends there"
        )
        raise ConfigError(msg)
