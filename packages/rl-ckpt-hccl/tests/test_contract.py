"""The contract of checkpoint engines, with and without sending from own storage."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from rl_core.testing.checkpoint_contract import (
    CheckpointEngineContract,
    CheckpointFault,
    FaultHook,
)

_FAULTS = Path(__file__).with_name("faults.py")


class Hccl:
    backend = "hccl"
    faults: ClassVar[Mapping[CheckpointFault, FaultHook]] = {
        CheckpointFault.CORRUPTED: FaultHook("receiver 0", f"{_FAULTS}:corrupt"),
        CheckpointFault.TRUNCATED: FaultHook("sender 0", f"{_FAULTS}:truncate"),
        CheckpointFault.MISSING: FaultHook("sender 0", f"{_FAULTS}:lose"),
    }


@pytest.mark.engine
class TestHccl(Hccl, CheckpointEngineContract):
    pass


@pytest.mark.engine
class TestHcclPacked(Hccl, CheckpointEngineContract):
    @pytest.fixture(scope="class")
    def options(self):
        return {"direct_share": 0.0}
