"""Starting or joining Ray, and leaving nothing of it behind."""

import contextlib
import getpass
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import ray

from minirl import ray_watch
from minirl.bounded import Ending, bounded
from minirl.config import ClusterConfig
from minirl.interruption import deferred, put_handlers_back, received
from rl_core.deadlines import Deadline
from rl_core.errors import ConfigError, LifecycleError, in_one_line
from rl_core.logs import kv

_logger = logging.getLogger(__name__)

SLOT = "minirl_slot"
"""Custom Ray resource that stands for a device where there is none."""

_RESOURCES = {"cpu": SLOT, "cuda": "GPU", "npu": "NPU"}
_OBJECT_STORE_BYTES = 256 << 20
_EVERY_S = 0.01
_START_S = 120.0
_GIVE_UP_S = 10.0
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
    # Its head would remember each of the last 100,000 calls, for a dashboard that a run has not:
    # 32 KiB more for every weight sync.
    "RAY_task_events_report_interval_ms": "0",
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
    cluster: ClusterConfig, device: str, slots: int, directory: Path | None, ending: Ending
) -> Iterator[None]:
    """Ray for the length of the block: a local one of our own, or the cluster at `ray_address`.

    Args:
        cluster: the `cluster` section.
        device: cpu, cuda or npu.
        slots: devices that the run needs; what a local Ray on cpu offers.
        directory: of the `session_directory`, for a local Ray.
        ending: what limits the shutdown.
    """
    os.environ.update(ENVIRONMENT)
    if cluster.ray_address is not None:
        with _joined(cluster.ray_address, ending):
            yield
        return
    with _started({SLOT: slots} if device == "cpu" else None, directory, ending):
        _logger.info("Ray initialized. %s", kv(address="local", resource=resource_name(device)))
        yield


@contextlib.contextmanager
def _started(
    resources: dict[str, float] | None, directory: Path | None, ending: Ending
) -> Iterator[None]:
    """A local Ray, started by a thread of its own.

    In the main thread `ray.init` would make SIGTERM a `SystemExit` in the middle of it; and where a
    signal to the whole process group ends what it has just started, it waits for that a minute and
    then ends this process. The thread stays: Ray's processes die with the one that started them
    (prctl(2), PR_SET_PDEATHSIG).
    """
    outcome: Future[object] = Future()
    over = threading.Event()

    def start() -> None:
        try:
            outcome.set_result(
                ray.init(
                    resources=resources,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    _temp_dir=str(directory),
                    configure_logging=False,
                )
            )
        except Exception as error:  # noqa: BLE001  (raised again below, in the main thread)
            outcome.set_exception(error)
        over.wait()

    try:
        with deferred():
            threading.Thread(target=start, name="ray.init", daemon=True).start()
            _await_start(outcome)
        ray_watch.watch()
        yield
    finally:
        ray_watch.forget()
        if outcome.done():  # else it is stuck, and what it has started is killed
            leave(ending)
        over.set()


def _await_start(outcome: "Future[object]") -> None:
    """The error of `ray.init`, if it fails; after a signal it has only a moment to end."""
    deadline = Deadline.after(_START_S)
    while not wait([outcome], _EVERY_S).done:
        put_handlers_back()
        if received() is not None:
            deadline = deadline.sooner(_GIVE_UP_S)
        if deadline.expired:
            raise LifecycleError(f"Ray did not start within {_START_S:.0f} s")
    put_handlers_back()
    outcome.result()


@contextlib.contextmanager
def _joined(address: str, ending: Ending) -> Iterator[None]:
    _join(address)
    try:
        _logger.info("Ray initialized. %s", kv(address=address, nodes=len(ray.nodes())))
        yield
    finally:
        leave(ending)


def leave(ending: Ending) -> None:
    """Shut Ray down, or leave the cluster; what SIGTERM does stays as it was.

    Ray's shutdown resets it by sigaction(2), which Python does not notice: from then on the signal
    would end this process before it has cleared away what the run leaves behind.
    """
    limit = ending.at_most(_STOP_S)
    bounded(ray.shutdown, limit, "ray.shutdown", meanwhile=put_handlers_back)


def _join(address: str) -> None:
    """`ray.init` in a thread, since it has no deadline and holds signals back while it waits."""
    failures: list[Exception] = []

    def join() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # noqa: BLE001  (raised again below, in the main thread)
            failures.append(error)

    ended = bounded(join, JOIN_S, "ray.init", meanwhile=put_handlers_back)
    if not ended:
        raise ConfigError(f"cluster.ray_address={address}: no answer within {JOIN_S:.0f} s")
    if failures:
        msg = f"cluster.ray_address={address}: cannot join: {in_one_line(failures[0])}"
        raise ConfigError(msg) from failures[0]
