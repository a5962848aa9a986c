"""What a train engine, a checkpoint engine and a rollout engine promise to each other.

Only types cross package borders. Everything here is synchronous: a blocking call takes a
`Deadline` (or a timeout in seconds, where it crosses a process border) and is run by its caller in
a worker thread if it must not block. Nothing here imports torch; tensors are annotations only.
"""

from rl_core.interfaces.leases import (
    BucketLease,
    LeasedTensor,
    TensorStream,
)
from rl_core.interfaces.placement import (
    Handle,
    Launcher,
    Pending,
    Placement,
    RankPlace,
    RolloutMode,
)
from rl_core.interfaces.rollout import (
    LiveContent,
    LiveWeights,
    LoadReport,
    PauseMode,
    Replica,
    RolloutAdapter,
    RolloutBackend,
    SupportsEarlyCompletions,
    SupportsEngineCheck,
    SupportsLiveContent,
    SupportsLiveDigests,
    SupportsProgress,
)
from rl_core.interfaces.training import (
    SupportsCheckpointBehind,
    SupportsFileCheck,
    SupportsParameterCount,
    SupportsPerturbation,
    SupportsReference,
    SupportsUpdateScores,
    TrainBackend,
    TrainEngine,
)
from rl_core.interfaces.transfer import (
    CheckedDirectory,
    CheckpointBackend,
    CheckpointEngine,
    Endpoint,
    Place,
    SupportsCheckpointPath,
    SupportsKeptVersions,
    TransferReport,
    TransferRole,
)
from rl_core.interfaces.version import (
    API_VERSION,
)

__all__ = [
    "API_VERSION",
    "BucketLease",
    "CheckedDirectory",
    "CheckpointBackend",
    "CheckpointEngine",
    "Endpoint",
    "Handle",
    "Launcher",
    "LeasedTensor",
    "LiveContent",
    "LiveWeights",
    "LoadReport",
    "PauseMode",
    "Pending",
    "Place",
    "Placement",
    "RankPlace",
    "Replica",
    "RolloutAdapter",
    "RolloutBackend",
    "RolloutMode",
    "SupportsCheckpointBehind",
    "SupportsCheckpointPath",
    "SupportsEarlyCompletions",
    "SupportsEngineCheck",
    "SupportsFileCheck",
    "SupportsKeptVersions",
    "SupportsLiveContent",
    "SupportsLiveDigests",
    "SupportsParameterCount",
    "SupportsPerturbation",
    "SupportsProgress",
    "SupportsReference",
    "SupportsUpdateScores",
    "TensorStream",
    "TrainBackend",
    "TrainEngine",
    "TransferReport",
    "TransferRole",
]
