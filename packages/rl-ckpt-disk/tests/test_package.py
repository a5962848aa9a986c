"""The contract of packages."""

from rl_core.plugins import CHECKPOINT_ENGINES
from rl_core.testing.package_contract import PackageContract


class TestPackage(PackageContract):
    distribution = "rl-ckpt-disk"
    module = "rl_ckpt_disk"
    entry = (CHECKPOINT_ENGINES, "disk")
