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
        tp_size = config.tensor_model_parallel_size
        if placement.tp_size != tp_size:
            msg = (
                f"rollout.tensor_model_parallel_size={tp_size}, but the placement has "
                f"{placement.tp_size} ranks"
            )
            raise ConfigError(msg)
        if placement.nnodes != 1:
            msg = f"a vLLM replica lives on one node, the placement spans {placement.nnodes}"
            raise ConfigError(msg)
        self._config = config
        self._launcher = launcher
        self._placement = placement
        self._process: Handle | None = None
        self._server: Handle | None = None
        self._address = ""

    def warm_up(self) -> None:
        """Create the server's process and let it import vLLM; `start` reports what goes wrong."""
        if self._process is None:
            self._process = self._launch()
            self._process.submit("warm_up")

    def start(self, deadline: Deadline) -> None:
        """Start the server and wait until it answers; no request is served yet.

        Errors: ComponentError (vLLM is missing), ConfigError, LifecycleError (it did not come up
        in time, or its process died). Nothing is left running then.
        """
        if self._server is not None:
            raise LifecycleError("the replica was already started")
        server = self._process if self._process is not None else self._launch()
        self._process = server  # for `shutdown`, which another thread may call meanwhile
        timeout = deadline.sooner(self._config.start_timeout_s).remaining()
        try:
            self._address = server.call("start", timeout=timeout)
        except TimeoutError as error:
            self._process = None
            server.kill()
            msg = f"vLLM replica {self._placement.replica_rank} did not start in {timeout:.0f} s"
            raise LifecycleError(msg) from error
        except BaseException:
            self._process = None
            server.kill()
            raise
        self._server = server
        if self._process is not server:
            self._server = None
            server.kill()
            raise LifecycleError("the replica was shut down while it started")
        self._process = None

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
        if self._process is not None:
            self._process.kill()
            self._process = None
        server, self._server = self._server, None
        if server is None:
            return
        try:
            # Whatever goes wrong in an orderly end, killing the process ends it all the same.
            with contextlib.suppress(MiniRLError, TimeoutError):
                server.call("shutdown", timeout=timeout)
        finally:
            server.kill()

    def _launch(self) -> Handle:
        return self._launcher.launch(
            SERVER,
            {"config": self._config, "placement": self._placement},
            server_env(self._config, self._placement),
            self._placement,
        )

    def _started(self) -> Handle:
        if self._server is None:
            raise LifecycleError("the vLLM replica is not running")
        return self._server
