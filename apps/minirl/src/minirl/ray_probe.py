"""Asking a Ray cluster what it has, before the run joins it.

`ray.init` gives no deadline and cannot be interrupted while it waits for an address that nobody
answers. So a process of its own joins first: it can be ended.

    python -m minirl.ray_probe ADDRESS
"""

import json
import socket
import subprocess
import sys

import msgspec

from minirl.config import ClusterConfig
from minirl.socket_room import check_temporary_directory
from rl_core.errors import ConfigError, in_one_line

CONNECT_S = 10.0
"""Seconds to open a TCP connection to it."""

PROBE_S = 30.0
"""Seconds that a cluster has to answer: joining one takes two or three."""


class Answer(msgspec.Struct, frozen=True):
    """What the probe found: the cluster's resources by name, or why it could not join."""

    resources: dict[str, float] = {}
    error: str | None = None


def check_cluster(cluster: ClusterConfig, resource: str, wanted: int) -> None:
    """ConfigError unless the cluster at `ray_address` answers and has `wanted` of `resource`.

    Without an address: unless a local one can have its sockets.
    """
    if cluster.ray_address is None:
        check_temporary_directory()
        return
    where = f"cluster.ray_address={cluster.ray_address}"
    _connect(cluster.ray_address, where)
    answer = _ask(cluster.ray_address, where)
    if answer.error is not None:
        raise ConfigError(f"{where}: cannot join: {answer.error}")
    have = answer.resources.get(resource, 0)
    if have < wanted:
        msg = (
            f"{where}: the run needs {wanted} x {resource}, the cluster has {have:g}; lower "
            "n_gpus_per_node or nnodes, or start nodes with more"
        )
        raise ConfigError(msg)


def _connect(address: str, where: str) -> None:
    """Say at once that nobody listens; Ray would go on trying."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return  # such as `auto`
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"{where}: cannot connect: {error}; is `ray start` running?") from error


def _ask(address: str, where: str) -> Answer:
    command = [sys.executable, "-m", "minirl.ray_probe", address]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        msg = f"{where}: no Ray cluster answered within {PROBE_S:.0f} s; is `ray start` running?"
        raise ConfigError(msg) from None
    lines = done.stdout.splitlines() or [b""]
    try:
        return msgspec.json.decode(lines[-1], type=Answer)
    except msgspec.DecodeError:
        return Answer(error=f"Ray ended with code {done.returncode}; is it a Ray cluster?")


def main(address: str) -> None:
    """Join the cluster and print an `Answer` as JSON."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        answer = {"resources": ray.cluster_resources()}
    except Exception as error:  # noqa: BLE001  (whatever it is, the run must hear of it)
        answer = {"error": in_one_line(error)}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
