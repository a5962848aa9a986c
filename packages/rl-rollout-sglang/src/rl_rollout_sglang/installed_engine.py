"""Which SGLang this package works with, and where one says what its arguments are."""

from rl_core.rollout.installed_engine import InstalledEngine
from rl_core.rollout.version_range import VersionRange

ENGINE = InstalledEngine(
    name="SGLang",
    module="sglang",
    distributions=("sglang",),
    supported=VersionRange("0.5.20", "0.5.23"),
    remedy="pip install 'rl-rollout-sglang[cpu]' (or [engine])",
    arguments=("srt/arg_groups/fields/*.py",),
)
"""From the oldest whose sources have what is used (the plain load path) to the newest tried:
before 0.5.20 `ServerArgs` is another kind of class; 0.5.12 has no msgpack messages either."""
