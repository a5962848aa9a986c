"""The contract of packages."""

from rl_core.plugins import CHECKPOINT_ENGINES
from rl_core.testing.package_contract import FOREIGN, PackageContract


class TestPackage(PackageContract):
    distribution = "rl-ckpt-mooncake"
    module = "rl_ckpt_mooncake"
    entry = (CHECKPOINT_ENGINES, "mooncake")
    blocked = ("mooncake", *FOREIGN)
