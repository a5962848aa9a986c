"""FSDP2 training of the policy in LLM reinforcement learning.

Importing this package imports neither torch nor transformers: `TRAIN_ENGINE` names the heavy
parts as text, and they are imported in the process that trains.
"""

from rl_core.interfaces import TrainBackend

TRAIN_ENGINE = TrainBackend(
    name="fsdp2",
    config_cls="rl_train_fsdp.config:FsdpConfig",
    engine="rl_train_fsdp.engine:FsdpTrainEngine",
)
"""What the entry-point group `minirl.train_engines` finds under the name `fsdp2`."""

__all__ = ["TRAIN_ENGINE"]
