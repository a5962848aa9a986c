"""What is optimised: the section `algorithm`, and DAPO's part of `reward`.

Names are verl's, where verl has one.
"""

from dataclasses import dataclass, field


@dataclass
class OverlongBufferConfig:
    """`reward.overlong_buffer`: responses near the length limit lose reward (DAPO)."""

    enable: bool = False
    len: int = 0
    """Tokens before `rollout.max_completion_length` in which the penalty grows."""
    penalty_factor: float = 1.0
    """What a response of full length loses."""


@dataclass
class FilterGroupsConfig:
    """DAPO's dynamic sampling (arXiv:2503.14476, section 3.2)."""

    enable: bool = False
    """Train only on groups whose rewards differ; ask further prompts for those left out."""
    max_num_gen_batches: int = 4
    """Batches of `data.train_batch_size` prompts generated for one step at most; the step trains
    on what was found until then, be it nothing."""


@dataclass
class RolloutCorrectionConfig:
    """Truncated importance sampling between the rollout engine and the trainer."""

    rollout_is: str | None = None
    """null: off | token: each token by its own ratio | sequence: all by their response's."""
    rollout_is_threshold: float = 2.0
    """Cap of the ratio, the trainer's probability over the rollout engine's."""


@dataclass
class AlgorithmConfig:
    """What is optimised."""

    adv_estimator: str = "grpo"
    """grpo | dr_grpo | rloo | reinforce_plus_plus | ppo (with a critic)."""
    loss_mode: str = "vanilla"
    """vanilla: ratio of each token | gspo: of the sequence."""
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    """Lower bound of the ratio, 1 - clip_ratio_low; null takes clip_ratio."""
    clip_ratio_high: float | None = None
    """Upper bound of the ratio, 1 + clip_ratio_high; null takes clip_ratio."""
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    """Weight of the policy's entropy, a bonus that keeps it exploring."""
    loss_agg_mode: str = "token-mean"
    """token-mean | seq-mean-token-mean | seq-mean-token-sum | seq-mean-token-sum-norm (over
    rollout.max_completion_length)."""
    norm_adv_by_std: bool = True
    """grpo: divide by the standard deviation of the group's rewards."""
    gamma: float = 1.0
    """ppo: discount of the reward, a token."""
    lam: float = 0.95
    """ppo: lambda of GAE."""
    vf_coef: float = 0.1
    """ppo: weight of the value loss. The critic is a head on the policy's own layers."""
    cliprange_value: float = 0.2
    """ppo: a value counts within so much of what it was before the update."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    ppo_epochs: int = 1
    ppo_mini_batch_size: int | None = None
    """Samples per optimizer step, over all ranks; null takes the whole batch."""
    recompute_old_log_probs: bool = False
    """Compute log-probabilities before the update in a pass of their own, also where its single
    optimizer step on all samples tells them."""
