"""Settings of the reference rollout backend."""

from dataclasses import dataclass, field

from rl_core.errors import ConfigError
from rl_core.interfaces import PauseMode
from rl_core.testing.reference_weights import ReferenceModelConfig


@dataclass(frozen=True)
class ReferenceConfig:
    """One replica of the reference engine."""

    model: ReferenceModelConfig = field(default_factory=ReferenceModelConfig)
    """Sizes of its model."""
    kv_rows: int = 8
    """Sequences that have KV memory at the same time."""
    server: str = "rl_core.testing.reference_server:ReferenceServer"
    """`module:Class` of the server, so that a test can break it."""
    on_update: PauseMode = PauseMode.ABORT
    """What happens to requests in flight when an update begins."""
    call_timeout_s: float = 30.0
    """Seconds given to calls without a deadline of their own, such as the fence after an error."""

    def __post_init__(self) -> None:
        if self.kv_rows < 1:
            raise ConfigError(f"kv_rows={self.kv_rows}: at least 1")
