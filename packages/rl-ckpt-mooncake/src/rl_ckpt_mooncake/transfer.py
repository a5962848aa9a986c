"""Mooncake's TransferEngine, typed: every return code becomes an error that says what to do.

Mooncake returns numbers and never raises on I/O. It also takes any protocol, and uses tcp for what
it does not know or has no hardware for; both are refused here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_ckpt_mooncake.config import PROTOCOLS
from rl_ckpt_mooncake.library import load_library
from rl_ckpt_mooncake.waiting import wait_until
from rl_core.errors import ConfigError
from rl_core.transfer.transport import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PENDING, _DONE = 0, 1
"""What transfer_check_status returns, once: a batch that is not pending any more is freed by it."""

_INFINIBAND = Path("/sys/class/infiniband")

_REMEDIES = {
    -1: "refused or failed: the peer is gone, or the memory is not registered there (any more)",
    -2: "too many requests are under way",
    -3: "the address is not registered",
    -6: "no such device: look at option device_name",
    -7: "it overlaps memory that is registered already: finalize the sync before it",
    -101: "the host name cannot be resolved: give an address",
    -102: "the connection failed: is the port blocked by a firewall?",
    -104: "the peer refused the handshake: do both sides use the same protocol?",
    -302: "memory could not be pinned: raise the limit of locked memory (ulimit -l)",
}
"""What the return codes of Mooncake mean here."""


@dataclass(frozen=True)
class Run:
    """A run of bytes to copy: where it is at the peer, where it goes here; addresses."""

    theirs: int
    mine: int
    nbytes: int


@dataclass(frozen=True)
class Listening:
    """How to start an engine.

    Attributes:
        host: address by which others reach it; Mooncake listens on every interface regardless.
        protocol: `tcp`, `rdma` or `ascend`.
        device: `cpu`, `cuda` or `npu`, for install hints.
        device_name: network devices for rdma.
        stall_timeout_s: after which a read without progress is given up.
    """

    host: str
    protocol: str
    device: str = "cpu"
    device_name: str = ""
    stall_timeout_s: int = 10


class Transfer:
    """One TransferEngine, listening from its construction until `close`.

    The first call to a peer asks it for its memory, and blocks for as long as that takes; all other
    waits can be ended.

    Attributes:
        session: `host:port` by which peers reach it.
    """

    def __init__(self, listening: Listening) -> None:
        """Start it.

        Errors: ConfigError (protocol), ComponentError (library), TransportError.
        """
        check_protocol(listening.protocol)
        library = load_library(listening.device)
        _set_environment(listening.stall_timeout_s)
        self._engine: Any = library()
        host, protocol = listening.host, listening.protocol
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, listening.device_name)
        _check(code, f"starting an engine for {protocol} on {host}")
        self.session = f"{host}:{self._engine.get_rpc_port()}"

    def register(self, address: int, nbytes: int, what: str) -> None:
        """Let every peer that reaches the port read and write this memory."""
        _check(self._open().register_memory(address, nbytes), f"registering {what}")

    def unregister(self, address: int, what: str) -> None:
        """Let nobody begin to read or write it any more; what is under way goes on."""
        _check(self._open().unregister_memory(address), f"unregistering {what}")

    def read(self, session: str, runs: Sequence[Run], what: str, check: Callable[[], None]) -> None:
        """Copy runs of a peer's registered memory into ours; empty ones are left out.

        Args:
            session: of the peer.
            runs: what to copy.
            what: to call it in messages.
            check: called while waiting; raises to stop that. The transfer itself goes on then, so
                the memory must be kept until `close`.
        """
        # One batch for each: transfer_check_status looks at the first task of a batch only.
        batches = [self._begin_reading(session, run) for run in runs if run.nbytes]
        for batch in batches:
            self._await(batch, f"reading {what} from {session}", check)

    def write(self, session: str, run: Run, what: str, check: Callable[[], None]) -> None:
        """Copy a run of our memory into a peer's registered memory; arguments as for `read`."""
        batch = self._open().transfer_submit_write(session, run.mine, run.theirs, run.nbytes)
        self._await(batch, f"writing {what} to {session}", check)

    def close(self) -> None:
        """Stop listening and break off what peers have under way here. Idempotent.

        Takes Mooncake about a second, with the interpreter lock held. Memory that was registered
        may be given back after it, not before.
        """
        self._engine = None

    def _begin_reading(self, session: str, run: Run) -> int:
        """Nothing of the engine stays in a variable: a failure's traceback would keep it open."""
        return int(
            self._open().batch_transfer_async_read(session, [run.mine], [run.theirs], [run.nbytes])
        )

    def _await(self, batch: int, what: str, check: Callable[[], None]) -> None:
        """Wait without spinning, as Mooncake's own waiting calls do: that costs them a core."""
        _check(0 if batch > 0 else -1, what)
        codes: list[int] = []

        def ended() -> bool:
            codes.append(self._open().transfer_check_status(batch))
            return codes[-1] != _PENDING

        wait_until(ended, check)
        _check(0 if codes[-1] == _DONE else codes[-1], what)

    def _open(self) -> Any:
        if self._engine is None:
            raise TransportError("the transfer engine was closed")
        return self._engine


def check_protocol(protocol: str) -> None:
    """ConfigError for a protocol that Mooncake would silently replace by tcp."""
    if protocol not in PROTOCOLS:
        msg = f"protocol is {protocol!r}, must be one of {', '.join(PROTOCOLS)}"
        raise ConfigError(f"{msg}; Mooncake itself would take it and use tcp")
    if protocol != "tcp" and os.environ.get("MC_FORCE_TCP"):
        msg = f"protocol is {protocol!r}, but MC_FORCE_TCP is set, and Mooncake would obey that"
        raise ConfigError(f"{msg}: unset it, or set protocol to 'tcp'")
    if protocol == "rdma" and not (_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())):
        msg = f"protocol is 'rdma', but there is no RDMA device ({_INFINIBAND} has none)"
        raise ConfigError(f"{msg}; Mooncake would use tcp without saying so: set protocol to 'tcp'")


def _set_environment(stall_timeout_s: int) -> None:
    """Mooncake's settings, which it reads from the environment; what is set already stays."""
    for name in ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC", "MC_TRANSFER_TIMEOUT"):
        os.environ.setdefault(name, str(stall_timeout_s))


def _check(code: int, what: str) -> None:
    if code != 0:
        remedy = _REMEDIES.get(code, "an error of Mooncake; its own log on stderr may say more")
        raise TransportError(f"{what}: Mooncake returned {code}: {remedy}")
