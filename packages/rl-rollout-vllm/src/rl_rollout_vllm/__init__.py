"""vLLM as a rollout engine: weights are updated in place, every token names its version.

Importing this package imports neither vLLM nor torch; they are imported where the engine runs.
"""

from rl_core.interfaces import RolloutBackend

ROLLOUT_BACKEND = RolloutBackend(
    name="vllm",
    config_cls="rl_rollout_vllm.config:VllmConfig",
    replica="rl_rollout_vllm.replica:VllmReplica",
    adapter="rl_rollout_vllm.adapter:VllmAdapter",
    layout="rl_rollout_vllm.layout:layout",
    probe="rl_rollout_vllm.probe:probe",
    engine_name="vLLM",
)
"""Found through the entry-point group `minirl.rollout_backends`."""

__all__ = ["ROLLOUT_BACKEND"]
