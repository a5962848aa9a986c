"""The key-value store in which the ranks of a group find each other.

torch's own, over TCP, without authentication: it carries addresses only, lives as long as the
group, and listens on the sender's interface, not on all of them as torch would by itself.
"""

import socket
from datetime import timedelta

from torch import distributed as dist

from rl_core.errors import TransferError


def serve_store(host: str, seconds: float) -> tuple[dist.TCPStore, str]:
    """A store on a free port of `host`, and its address; sender."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.bind((host, 0))
        listening.listen()
        port = listening.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    except (OSError, RuntimeError) as error:
        raise TransferError(f"cannot serve a store on {host}: {error}") from error
    finally:
        listening.close()
    return store, f"{host}:{port}"


def join_store(address: str, seconds: float) -> dist.TCPStore:
    """A client of the store at `address`; receivers."""
    host, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=seconds))
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"cannot reach the store at {address}: {error}") from error
