"""The reference rollout backend: its replica, and what a package would announce for it."""

from rl_core.deadlines import Deadline
from rl_core.errors import LifecycleError, MiniRLError
from rl_core.interfaces import Handle, Launcher, Placement, Replica, RolloutBackend
from rl_core.testing.reference_config import ReferenceConfig

REFERENCE_BACKEND = RolloutBackend(
    name="reference",
    config_cls="rl_core.testing.reference_config:ReferenceConfig",
    replica="rl_core.testing.reference_replica:ReferenceReplica",
    adapter="rl_core.testing.reference_adapter:ReferenceAdapter",
    engine_name="Reference",
)
"""A complete rollout backend in milliseconds; a test double."""


class ReferenceReplica(Replica):
    """Starts one reference server through a launcher."""

    def __init__(self, config: ReferenceConfig, launcher: Launcher, placement: Placement) -> None:
        self._config = config
        self._launcher = launcher
        self._placement = placement
        self._server: Handle | None = None
        self._address = ""

    def warm_up(self) -> None:
        """Nothing: there is no engine to import."""

    def start(self, deadline: Deadline) -> None:
        """Start the server and wait until it answers."""
        kwargs = {"config": self._config, "placement": self._placement}
        env = {"OMP_NUM_THREADS": "1"}
        self._server = self._launcher.launch(self._config.server, kwargs, env, self._placement)
        self._address = self._server.call("start", timeout=deadline.remaining())

    @property
    def address(self) -> str:
        """`host:port` of its HTTP server."""
        if not self._address:
            raise LifecycleError("the replica was not started")
        return self._address

    @property
    def server(self) -> Handle:
        """The server, for adapters."""
        if self._server is None:
            raise LifecycleError("the replica was not started")
        return self._server

    def shutdown(self, timeout: float) -> None:
        """Stop the server. Idempotent."""
        server, self._server, self._address = self._server, None, ""
        if server is None:
            return
        try:
            server.call("stop", timeout=timeout)
        except (MiniRLError, TimeoutError):
            pass  # it is killed anyway
        finally:
            server.kill()
