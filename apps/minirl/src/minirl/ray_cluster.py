"""Starting or joining Ray, and leaving nothing of it behind."""

import contextlib
import getpass
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ray

from minirl import ray_watch
from minirl.bounded import bounded
from minirl.config import ClusterConfig
from minirl.interruption import deferred, put_handlers_back
from rl_core.errors import ConfigError, in_one_line
from rl_core.logs import kv

_logger = logging.getLogger(__name__)

SLOT = "minirl_slot"
"""Custom Ray resource that stands for a device where there is none."""

_RESOURCES = {"cpu": SLOT, "cuda": "GPU", "npu": "NPU"}
_OBJECT_STORE_BYTES = 256 << 20
_STOP_S = 6.0
JOIN_S = 60.0
"""Seconds to join a cluster that has just answered `ray_probe`."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would otherwise hide devices from actors that ask for none of them.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray would run workers at nice 15; next to anything else on the machine they starve.
    "RAY_worker_niceness": "0",
    # Our actors get processes of their own; a worker for each core in advance would serve nobody.
    "RAY_prestart_worker_first_driver": "0",
}
"""What Ray reads from the environment of whoever starts it."""


def resource_name(device: str) -> str:
    """Name of the Ray resource of one device of that kind."""
    return _RESOURCES[device]


@contextlib.contextmanager
def session_directory(cluster: ClusterConfig) -> Iterator[Path | None]:
    """Directory of a local Ray and of everything temporary below it, for the length of the block.

    What is started in the block, and its descendants, put their temporary files there, so they
    vanish with the run, also those of engines that are killed before they can clear away. To be
    left when no process of the run lives any more. Compiled kernels, which are worth keeping, stay
    where PyTorch puts them by default. None, and nothing changed, where a cluster is joined.
    """
    if cluster.ray_address is not None:
        yield None
        return
    # A directory of our own with a short name: Unix sockets below it have a length limit.
    directory = Path(tempfile.mkdtemp(prefix="minirl-ray-"))
    kernels = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kernels))
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(directory)
    try:
        yield directory
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def ray_session(
    cluster: ClusterConfig, device: str, slots: int, directory: Path | None
) -> Iterator[None]:
    """Ray for the length of the block: a local one of our own, or the cluster at `ray_address`.

    Args:
        cluster: the `cluster` section.
        device: cpu, cuda or npu.
        slots: devices that the run needs; what a local Ray on cpu offers.
        directory: of the `session_directory`, for a local Ray.
    """
    os.environ.update(ENVIRONMENT)
    if cluster.ray_address is not None:
        with _joined(cluster.ray_address):
            yield
        return
    try:
        with deferred():
            ray.init(
                resources={SLOT: slots} if device == "cpu" else None,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(directory),
                configure_logging=False,
            )
        ray_watch.watch()
        _logger.info("Ray initialized. %s", kv(address="local", resource=resource_name(device)))
        yield
    finally:
        ray_watch.forget()
        leave()


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    _join(address)
    try:
        _logger.info("Ray initialized. %s", kv(address=address, nodes=len(ray.nodes())))
        yield
    finally:
        leave()


def leave() -> None:
    """Shut Ray down, or leave the cluster; what SIGTERM does stays as it was.

    Ray's shutdown resets it by sigaction(2), which Python does not notice: from then on the signal
    would end this process before it has cleared away what the run leaves behind.
    """
    bounded(ray.shutdown, _STOP_S, "ray.shutdown", meanwhile=put_handlers_back)


def _join(address: str) -> None:
    """`ray.init` in a thread, since it has no deadline and holds signals back while it waits."""
    failures: list[Exception] = []

    def join() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # noqa: BLE001  (raised again below, in the main thread)
            failures.append(error)

    ended = bounded(join, JOIN_S, "ray.init")
    if not ended:
        raise ConfigError(f"cluster.ray_address={address}: no answer within {JOIN_S:.0f} s")
    if failures:
        msg = f"cluster.ray_address={address}: cannot join: {in_one_line(failures[0])}"
        raise ConfigError(msg) from failures[0]
