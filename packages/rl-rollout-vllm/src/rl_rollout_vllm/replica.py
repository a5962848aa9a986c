"""One rollout replica, as its owner sees it: starts the server, knows its address, ends it."""

import contextlib
import logging

from rl_core.deadlines import Deadline
from rl_core.errors import ConfigError, LifecycleError, MiniRLError
from rl_core.interfaces import Handle, Launcher, Placement, Replica
from rl_rollout_vllm.config import VllmConfig
from rl_rollout_vllm.server_env import server_env

logger = logging.getLogger(__name__)

SERVER = "rl_rollout_vllm.server:VllmServer"


class VllmReplica(Replica):
    """Starts a `VllmServer` through a launcher. Runs in the controller's process."""

    def __init__(self, config: VllmConfig, launcher: Launcher, placement: Placement) -> None:
        if placement.tp_size != config.tensor_parallel_size:
            msg = (
                f"rollout.tensor_parallel_size={config.tensor_parallel_size}, but the placement "
                f"has {placement.tp_size} ranks"
            )
            raise ConfigError(msg)
        if placement.nnodes != 1:
            msg = f"a vLLM replica lives on one node, the placement spans {placement.nnodes}"
            raise ConfigError(msg)
        self._config = config
        self._launcher = launcher
        self._placement = placement
        self._server: Handle | None = None
        self._address = ""

    def start(self, deadline: Deadline) -> None:
        """Start the server and wait until it answers; no request is served yet.

        Errors: ComponentError (vLLM is missing), ConfigError, LifecycleError (it did not come up
        in time, or its process died). Nothing is left running then.
        """
        if self._server is not None:
            raise LifecycleError("the replica was already started")
        server = self._launcher.launch(
            SERVER,
            {"config": self._config, "placement": self._placement},
            server_env(self._config, self._placement),
            self._placement,
        )
        timeout = deadline.sooner(self._config.start_timeout_s).remaining()
        try:
            self._address = server.call("start", timeout=timeout)
        except TimeoutError as error:
            server.kill()
            msg = f"vLLM replica {self._placement.replica_rank} did not start in {timeout:.0f} s"
            raise LifecycleError(msg) from error
        except BaseException:
            server.kill()
            raise
        self._server = server

    @property
    def address(self) -> str:
        """`host:port` of the OpenAI-compatible HTTP server; LifecycleError before `start`."""
        self._started()
        return self._address

    @property
    def server(self) -> Handle:
        """The server, for adapters; LifecycleError before `start`."""
        return self._started()

    def shutdown(self, timeout: float) -> None:
        """Stop the server and every process it started. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        try:
            # Whatever goes wrong in an orderly end, killing the process ends it all the same.
            with contextlib.suppress(MiniRLError, TimeoutError):
                server.call("shutdown", timeout=timeout)
        finally:
            server.kill()

    def _started(self) -> Handle:
        if self._server is None:
            raise LifecycleError("the vLLM replica is not running")
        return self._server
