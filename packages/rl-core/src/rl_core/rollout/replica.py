"""One rollout replica, as its owner sees it: starts the server, knows its address, ends it."""

import contextlib
import threading
from abc import abstractmethod
from typing import ClassVar

from rl_core.deadlines import Deadline
from rl_core.errors import ConfigError, LifecycleError, MiniRLError
from rl_core.interfaces import Handle, Launcher, Placement, Replica
from rl_core.rollout.config import EngineConfig


class ServerReplica(Replica):
    """Starts a `RolloutServer` through a launcher. Runs in the controller's process.

    Attributes:
        engine_name: how messages spell the engine.
        server_cls: `module:Class` of the backend's server.
    """

    engine_name: ClassVar[str]
    server_cls: ClassVar[str]

    def __init__(self, config: EngineConfig, launcher: Launcher, placement: Placement) -> None:
        tp_size = config.tensor_model_parallel_size
        if placement.tp_size != tp_size:
            msg = (
                f"rollout.tensor_model_parallel_size={tp_size}, but the placement has "
                f"{placement.tp_size} ranks"
            )
            raise ConfigError(msg)
        if placement.nnodes != 1:
            msg = (
                f"a {self.engine_name} replica lives on one node, the placement spans "
                f"{placement.nnodes}"
            )
            raise ConfigError(msg)
        self._config = config
        self._launcher = launcher
        self._placement = placement
        self._process: Handle | None = None
        self._server: Handle | None = None
        self._address = ""
        self._closed = False
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Create the server's process, which imports the engine; `start` tells what went wrong."""
        with self._lock:
            if self._process is None and not self._closed:
                self._process = self._launch()
                self._process.submit("warm_up")

    def start(self, deadline: Deadline) -> None:
        """Start the server and wait until it answers; no request is served yet.

        Errors: ComponentError (the engine is missing), ConfigError, LifecycleError (it did not
        come up in time, or its process died). Nothing is left running then.
        """
        server = self._begin_start()
        timeout = deadline.sooner(self._config.start_timeout_s).remaining()
        try:
            address = server.call("start", timeout=timeout)
        except TimeoutError as error:
            self._drop(server)
            rank = self._placement.replica_rank
            msg = f"{self.engine_name} replica {rank} did not start in {timeout:.0f} s"
            raise LifecycleError(msg) from error
        except BaseException:
            self._drop(server)
            raise
        with self._lock:
            if self._process is server:  # not shut down meanwhile
                self._process, self._server, self._address = None, server, address
                return
        server.kill()
        raise LifecycleError("the replica was shut down while it started")

    def _begin_start(self) -> Handle:
        """The server's process, which `shutdown` in another thread may end from here on."""
        with self._lock:
            if self._closed:
                raise LifecycleError("the replica was shut down")
            if self._server is not None:
                raise LifecycleError("the replica was already started")
            if self._process is None:
                self._process = self._launch()
            return self._process

    def _drop(self, server: Handle) -> None:
        with self._lock:
            if self._process is server:
                self._process = None
        server.kill()

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
        with self._lock:
            self._closed = True
            starting, self._process = self._process, None
            server, self._server = self._server, None
        if starting is not None:
            starting.kill()
        if server is None:
            return
        try:
            # Whatever goes wrong in an orderly end, killing the process ends it all the same.
            with contextlib.suppress(MiniRLError, TimeoutError):
                server.call("shutdown", timeout=timeout)
        finally:
            server.kill()

    @abstractmethod
    def _environment(self) -> dict[str, str]:
        """Variables for the server's process, set before its interpreter starts."""

    def _launch(self) -> Handle:
        return self._launcher.launch(
            self.server_cls,
            {"config": self._config, "placement": self._placement},
            self._environment(),
            self._placement,
        )

    def _started(self) -> Handle:
        if self._server is None:
            raise LifecycleError(f"the {self.engine_name} replica is not running")
        return self._server
