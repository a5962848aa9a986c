"""`CheckpointEngineContract`: what every checkpoint engine must do.

A backend's contract test is a subclass and its settings:

```python
class TestMyEngine(CheckpointEngineContract):
    backend = "mine"                                  # entry point, or `module:ATTRIBUTE`
    lacks = {CheckpointCapability.PRIVATE_SOCKETS: "the library listens everywhere"}
    faults = {CheckpointFault.CORRUPTED: FaultHook("sender 0", f"{FAULTS}:flip"), ...}

    @pytest.fixture(scope="class")
    def options(self, tmp_path_factory):              # checkpoint_engine.options
        return {"root_dir": str(tmp_path_factory.mktemp("weights"))}
```

An engine whose control plane is `rl_core.transfer` adds `ChannelContract` (of
`rl_core.testing.channel_contract`) to the bases: forged, replayed and misplaced messages.

Two senders and two receivers run as real processes (`CheckpointDriver`); a test asks for a group
and gets the standing one where nothing else is needed. Engines that failed must recover in the
sync that follows; a test that leaves a failure behind costs the next one new engines, no more.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest

from rl_core.interfaces import Launcher
from rl_core.testing.checkpoint_case import DRIVER, CheckpointCase, Deadlines
from rl_core.testing.checkpoint_content_contract import ContentContract
from rl_core.testing.checkpoint_failure_contract import FailureContract
from rl_core.testing.checkpoint_faults import CheckpointFault, FaultHook
from rl_core.testing.checkpoint_lifecycle_contract import LifecycleContract
from rl_core.testing.checkpoint_memory_contract import MemoryContract
from rl_core.testing.checkpoint_orders import Options
from rl_core.testing.checkpoint_security_contract import CheckpointCapability, SecurityContract
from rl_core.testing.checkpoint_version_contract import VersionContract
from rl_core.testing.launcher import ProcessLauncher

__all__ = [
    "CheckpointCapability",
    "CheckpointCase",
    "CheckpointEngineContract",
    "CheckpointFault",
    "FaultHook",
]


class CheckpointEngineContract(
    ContentContract,
    VersionContract,
    FailureContract,
    LifecycleContract,
    SecurityContract,
    MemoryContract,
    contract=True,
):
    """Subclass it, name the backend, give hooks for the damage that only the backend can do.

    Attributes:
        backend: name of an installed backend, or `module:ATTRIBUTE` of a `CheckpointBackend`.
        environment: set in every process before it imports anything.
        deadline_s: deadline of calls that are expected to succeed.
        fault_deadline_s: deadline of calls that are expected to fail; the longest that a
            transport needs to notice a dead peer.
        many_syncs: length of the row of syncs after which nothing may have piled up.
        faults: hooks that damage the backend's own transport; see `CheckpointFault`.
        lacks: capabilities and faults that do not apply, each with the reason.
    """

    backend: ClassVar[str] = ""
    environment: ClassVar[Mapping[str, str]] = {}
    deadline_s: ClassVar[float] = 30.0
    fault_deadline_s: ClassVar[float] = 4.0

    @pytest.fixture(scope="class")
    def options(self) -> Options:
        """The backend's `checkpoint_engine.options`."""
        return {}

    @pytest.fixture(scope="class")
    def launcher(self) -> Launcher:
        """Starts the ranks."""
        return ProcessLauncher(preload=[DRIVER.partition(":")[0]])

    @pytest.fixture(scope="class")
    def case(self, options: Options, launcher: Launcher) -> Iterator[CheckpointCase]:
        """The processes that all tests of the class share."""
        deadlines = Deadlines(self.deadline_s, self.fault_deadline_s)
        case = CheckpointCase(self.backend, options, launcher, self.environment, deadlines)
        yield case
        case.close()
