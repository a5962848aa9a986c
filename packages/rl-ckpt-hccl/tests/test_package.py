"""The contract of packages."""

from rl_core.plugins import CHECKPOINT_ENGINES
from rl_core.testing.package_contract import FOREIGN, PackageContract


class TestPackage(PackageContract):
    distribution = "rl-ckpt-hccl"
    module = "rl_ckpt_hccl"
    entry = (CHECKPOINT_ENGINES, "hccl")
    blocked = ("torch_npu", *FOREIGN)
