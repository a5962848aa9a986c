from pathlib import Path

import pytest

from rl_core.testing.checkpoint_contract import (
    CheckpointEngineContract,
    CheckpointFault,
    FaultHook,
)

FAULTS = Path(__file__).with_name("faults.py")


@pytest.mark.engine
class TestHccl(CheckpointEngineContract):
    backend = "hccl"
    faults = {
        CheckpointFault.CORRUPTED: FaultHook("receiver 0", f"{FAULTS}:corrupt"),
        CheckpointFault.TRUNCATED: FaultHook("sender 0", f"{FAULTS}:truncate"),
        CheckpointFault.MISSING: FaultHook("sender 0", f"{FAULTS}:lose"),
    }


@pytest.mark.engine
class TestHcclPacked(CheckpointEngineContract):
    """The same without sending from own storage."""

    backend = "hccl"
    not_applicable = {}

    @pytest.fixture(scope="class")
    def options(self):
        return {"direct_share": 0.0}

    faults = TestHccl.faults
