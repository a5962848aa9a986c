"""SGLang as a rollout engine: weights are updated in place, every token names its version.

Importing this package imports neither SGLang nor torch; they are imported where the engine runs.
"""

from rl_core.interfaces import RolloutBackend

ROLLOUT_BACKEND = RolloutBackend(
    name="sglang",
    config_cls="rl_rollout_sglang.config:SglangConfig",
    replica="rl_rollout_sglang.replica:SglangReplica",
    adapter="rl_rollout_sglang.adapter:SglangAdapter",
    layout="rl_rollout_sglang.layout:layout",
    probe="rl_rollout_sglang.probe:probe",
    engine_name="SGLang",
)
"""Found through the entry-point group `minirl.rollout_backends`."""

__all__ = ["ROLLOUT_BACKEND"]
