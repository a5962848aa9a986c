"""Which SGLang this package works with, and where one says what its arguments are."""

from rl_core.rollout.installed_engine import InstalledEngine
from rl_core.rollout.version_range import VersionRange

ENGINE = InstalledEngine(
    name="SGLang",
    module="sglang",
    distributions=("sglang",),
    supported=VersionRange("0.5", "0.5.23"),
    remedy="pip install 'rl-rollout-sglang[cpu]' (or [engine])",
    arguments=("srt/arg_groups/fields/*.py",),
)
"""From the oldest that may have what is asked of it (plain load path) to the newest tried."""
