"""The contract of checkpoint engines, with buckets that are one piece, and several."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rl_core.testing.channel_contract import ChannelContract
from rl_core.testing.checkpoint_contract import (
    CheckpointCapability,
    CheckpointEngineContract,
    CheckpointFault,
    FaultHook,
)

_FAULTS = Path(__file__).with_name("faults.py")


@pytest.mark.engine
class TestMooncake(CheckpointEngineContract, ChannelContract):
    backend = "mooncake"
    fault_deadline_s: ClassVar[float] = 3.0
    faults: ClassVar[Mapping[CheckpointFault, FaultHook]] = {
        CheckpointFault.MISCOPIED: FaultHook("sender 0", "rl_core.testing.segment_faults:miscopy"),
        CheckpointFault.CORRUPTED: FaultHook("receiver 0", f"{_FAULTS}:corrupt"),
        CheckpointFault.TRUNCATED: FaultHook("sender 0", f"{_FAULTS}:truncate"),
        CheckpointFault.MISSING: FaultHook("sender 0", f"{_FAULTS}:lose"),
    }
    lacks: ClassVar[Mapping[Any, str]] = {
        CheckpointCapability.PRIVATE_SOCKETS: "Mooncake listens on every interface; see the README"
    }

    @pytest.fixture(scope="class")
    def options(self):
        return {"piece_megabytes": 1 / 32}  # two pieces a bucket
