from pathlib import Path
from typing import ClassVar

import pytest

from rl_core.testing.channel_contract import ChannelContract
from rl_core.testing.checkpoint_contract import (
    CheckpointEngineContract,
    CheckpointFault,
    FaultHook,
)

FAULTS = Path(__file__).with_name("faults.py")
FIRST_FILE = r"/model-00001-of-00003\.safetensors is missing"
"""Where the tensor is that the contract harms, with files of a quarter of a megabyte."""


@pytest.mark.engine
class TestDisk(CheckpointEngineContract, ChannelContract):
    backend = "disk"
    fault_deadline_s = 2.0
    faults: ClassVar = {
        CheckpointFault.MISCOPIED: FaultHook("sender 0", f"{FAULTS}:miscopy"),
        CheckpointFault.CORRUPTED: FaultHook("sender 0", f"{FAULTS}:corrupt"),
        CheckpointFault.TRUNCATED: FaultHook("sender 0", f"{FAULTS}:truncate"),
        CheckpointFault.MISSING: FaultHook("sender 0", f"{FAULTS}:lose", FIRST_FILE),
    }
    not_applicable: ClassVar = {
        "test_forged_bucket_of_a_member": "a version is a directory: no buckets are announced"
    }

    @pytest.fixture(scope="class")
    def options(self, tmp_path_factory):
        root = tmp_path_factory.mktemp("checkpoints")
        return {"root_dir": str(root), "max_shard_megabytes": 0.25}
