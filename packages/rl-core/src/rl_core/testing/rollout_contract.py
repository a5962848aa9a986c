"""`RolloutAdapterContract`: what every rollout adapter and its replica must do.

A backend's contract test is a subclass and a fixture:

```python
class TestMyEngine(RolloutAdapterContract):
    lacks = {RolloutCapability.DISK: "the engine reads its own format only"}

    @pytest.fixture(scope="class")
    @classmethod
    def rollout(cls):
        replica = MyReplica(config, ProcessLauncher(), placement)
        replica.start(Deadline.after(600))
        adapters = [MyAdapter(replica.server, rank, config) for rank in range(tp_size)]
        yield RolloutUnderTest(adapters, weights_a, weights_b, prompts=[[5, 6], [7, 8, 9]])
        replica.shutdown(30)
```

The replica is started once; every test begins with a sync of its own, so they run in any order.
"""

from collections.abc import Iterator

import pytest

from rl_core.testing.contract import Contract
from rl_core.testing.rollout_case import (
    ColdStart,
    RolloutCapability,
    RolloutCase,
    RolloutUnderTest,
)
from rl_core.testing.rollout_early_contract import EarlyContract
from rl_core.testing.rollout_failure_contract import FailureContract
from rl_core.testing.rollout_live_contract import LiveDigestContract
from rl_core.testing.rollout_memory_contract import MemoryContract
from rl_core.testing.rollout_pause_contract import PauseContract
from rl_core.testing.rollout_sync_contract import SyncContract

__all__ = [
    "ColdStart",
    "OnOneReplica",
    "RolloutAdapterContract",
    "RolloutCapability",
    "RolloutCase",
    "RolloutUnderTest",
]


class OnOneReplica(Contract, contract=True):
    """The fixtures of all parts of the contract: also for those who take a few parts only."""

    @pytest.fixture(scope="class")
    @classmethod
    def rollout(cls) -> RolloutUnderTest:
        """One started replica that was never synced; a backend's own fixture may yield it."""
        raise NotImplementedError("give a fixture `rollout` that yields a RolloutUnderTest")

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, rollout: RolloutUnderTest) -> Iterator[RolloutCase]:
        """The replica, with what it answers on A and on B."""
        case = RolloutCase(rollout)
        yield case
        case.threads.shutdown(wait=False, cancel_futures=True)


class RolloutAdapterContract(
    FailureContract,
    SyncContract,
    LiveDigestContract,
    PauseContract,
    EarlyContract,
    MemoryContract,
    OnOneReplica,
    contract=True,
):
    """Subclass it, give the fixture `rollout`, declare in `lacks` what is lacking and why."""
