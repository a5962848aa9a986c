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
from rl_core.errors import ConfigError
from rl_core.transfer.transport import TransportError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TCP_READ_BYTES = 1 << 20
"""Over tcp, reads of this size are a quarter faster than larger ones: they stay in the cache."""

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

    Calls block, without the interpreter lock, until Mooncake returns; no deadline ends them.

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
        self._slice = TCP_READ_BYTES if listening.protocol == "tcp" else 0
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

    def read(self, session: str, runs: Sequence[Run], what: str) -> None:
        """Copy runs of a peer's registered memory into ours."""
        slices = [piece for run in runs for piece in _slices(run, self._slice or run.nbytes)]
        alone = slices[:-2] if self._slice else []
        what = f"reading {what} from {session}"
        for one in alone:
            code = self._open().transfer_sync_read(session, one.mine, one.theirs, one.nbytes)
            _check(code, what)
        together = slices[len(alone) :]
        mine, theirs = [one.mine for one in together], [one.theirs for one in together]
        sizes = [one.nbytes for one in together]
        if together:
            code = self._open().batch_transfer_sync_read(session, mine, theirs, sizes)
            _check(code, what)

    def write(self, session: str, run: Run, what: str) -> None:
        """Copy into a peer's registered memory."""
        code = self._open().transfer_sync_write(session, run.mine, run.theirs, run.nbytes)
        _check(code, f"writing {what} to {session}")

    def close(self) -> None:
        """Stop listening and break off what peers have under way here. Idempotent.

        Takes Mooncake about a second, with the interpreter lock held. Memory that was registered
        may be given back after it, not before.
        """
        self._engine = None

    def _open(self) -> Any:
        if self._engine is None:
            raise TransportError("the transfer engine was closed")
        return self._engine


def _slices(run: Run, size: int) -> Iterator[Run]:
    for start in range(0, run.nbytes, size):
        yield Run(run.theirs + start, run.mine + start, min(size, run.nbytes - start))


def check_protocol(protocol: str) -> None:
    """ConfigError for a protocol that Mooncake would silently replace by tcp."""
    if protocol not in PROTOCOLS:
        msg = f"protocol is {protocol!r}, must be one of {', '.join(PROTOCOLS)}"
        raise ConfigError(f"{msg}; Mooncake itself would take it and use tcp")
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
