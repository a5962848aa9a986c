"""The types in which trainers, transports and rollout engines of an RL system meet.

Light on purpose: msgspec and xxhash, nothing else. What needs a tensor is in `rl_core.torch`
(extra `torch`); contracts that a backend can be tested against are in `rl_core.testing` (extra
`testing`).
"""

from rl_core.deadlines import CancelToken, Deadline
from rl_core.errors import MiniRLError
from rl_core.metadata import Manifest, TensorMeta, Trailer
from rl_core.versions import PolicyVersion

__all__ = [
    "CancelToken",
    "Deadline",
    "Manifest",
    "MiniRLError",
    "PolicyVersion",
    "TensorMeta",
    "Trailer",
]
