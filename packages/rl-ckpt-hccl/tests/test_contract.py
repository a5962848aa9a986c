"""The contract of checkpoint engines, over gloo.

Its tensors are smaller and larger than `direct_share` of its buckets, so both ways are taken.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from rl_core.testing.channel_contract import ChannelContract
from rl_core.testing.checkpoint_contract import (
    CheckpointEngineContract,
    CheckpointFault,
    FaultHook,
)

_FAULTS = Path(__file__).with_name("faults.py")


@pytest.mark.engine
class TestHccl(CheckpointEngineContract, ChannelContract):
    backend = "hccl"
    faults: ClassVar[Mapping[CheckpointFault, FaultHook]] = {
        CheckpointFault.MISCOPIED: FaultHook("sender 0", "rl_core.testing.segment_faults:miscopy"),
        CheckpointFault.CORRUPTED: FaultHook("receiver 0", f"{_FAULTS}:corrupt"),
        CheckpointFault.TRUNCATED: FaultHook("sender 0", f"{_FAULTS}:truncate"),
        CheckpointFault.MISSING: FaultHook("sender 0", f"{_FAULTS}:lose"),
    }
