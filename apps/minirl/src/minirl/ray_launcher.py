"""Objects in Ray actors, behind rl-core's `Launcher`, `Handle` and `Pending`."""

import contextlib
import inspect
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from minirl import ray_watch
from minirl.interruption import POLL_S, deferred
from minirl.last_words import ProcessLog
from minirl.worker_process import ProcessSettings, prepare_process
from rl_core.errors import MiniRLError, RolloutError, TransferError, in_one_line
from rl_core.interfaces import Placement
from rl_core.plugins import load_object


class MemberDiedError(TransferError):
    """A process of the run is gone."""


class ForeignError(RolloutError):
    """A process of the run raised what nobody translated."""


@contextlib.contextmanager
def errors_that_travel() -> Iterator[None]:
    """Turn what nobody translated into a ForeignError, in the process where it was raised.

    An exception of a library may need more than its text to be built again (those of
    huggingface_hub's dataclasses do); Ray would then report only that it cannot be read.
    """
    try:
        yield
    except MiniRLError:
        raise
    except Exception as error:
        raise ForeignError(f"{type(error).__name__}: {in_one_line(error)}") from error


def translated(error: RayError, who: str, log: ProcessLog | None = None) -> Exception:
    """What a failed Ray call means in our terms, in one line; `log` is what the process wrote."""
    if isinstance(error, RayActorError):
        words = log and log.last_words()
        reason = f"{words} (in {log.path})" if log and words else in_one_line(error)
        return MemberDiedError(f"{who} died: {reason}")
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ForeignError):
        return ForeignError(f"{who}: {cause}")
    if isinstance(cause, MiniRLError):
        return cause
    return ForeignError(f"{who}: {type(cause).__name__}: {in_one_line(cause)}")


def ready(references: list[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
    """Results that are there, and those that are not, after a wait of at most `POLL_S`.

    MemberDiedError if Ray itself is gone.
    """
    lost = ray_watch.dead()
    if lost is not None:
        raise MemberDiedError(f"Ray's {lost} died")
    with deferred():
        done, waiting = ray.wait(references, timeout=max(0.0, min(timeout_s, POLL_S)))
    return done, waiting


def fetch(reference: Any, who: str, log: ProcessLog | None = None) -> Any:
    """A result that is there, or its error in our terms; `log` is that of the process."""
    try:
        with deferred():
            return ray.get(reference)
    except RayError as error:
        raise translated(error, who, log) from error


class ObjectHost:
    """The Ray actor that holds one object and runs its methods, async ones concurrently."""

    def __init__(self, cls: str, kwargs: dict[str, Any], settings: ProcessSettings) -> None:
        prepare_process(settings)
        self._object = load_object(cls)(**kwargs)

    async def invoke(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one method to its end."""
        with errors_that_travel():
            result = getattr(self._object, method)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result


@dataclass(frozen=True)
class RayPending:
    """A Ray call under way."""

    reference: Any
    who: str
    log: ProcessLog | None = None

    def result(self, timeout: float) -> Any:
        """Its value, or its error in our terms; TimeoutError after `timeout` seconds."""
        end = time.monotonic() + timeout
        while not ready([self.reference], end - time.monotonic())[0]:
            if time.monotonic() >= end:
                msg = f"{self.who} did not answer within {timeout:.0f} s"
                raise TimeoutError(msg)
        return fetch(self.reference, self.who, self.log)


@dataclass(frozen=True)
class RayHandle:
    """An object in a Ray actor; picklable."""

    actor: ActorHandle
    name: str
    log: ProcessLog | None = None

    def submit(self, method: str, *args: Any, **kwargs: Any) -> RayPending:
        """Start `method` there."""
        reference = self.actor.invoke.remote(method, args, kwargs)
        return RayPending(reference, f"{self.name}.{method}", self.log)

    def call(self, method: str, *args: Any, timeout: float, **kwargs: Any) -> Any:
        """Start `method` and wait for its result."""
        return self.submit(method, *args, **kwargs).result(timeout)

    def kill(self) -> None:
        """End the actor's process. Idempotent."""
        with contextlib.suppress(RayActorError, ValueError):
            ray.kill(self.actor)


class RayLauncher:
    """Starts objects as Ray actors on the node that the placement names."""

    def __init__(self, settings: ProcessSettings) -> None:
        self._settings = settings

    def launch(
        self, cls: str, kwargs: Mapping[str, Any], env: Mapping[str, str], placement: Placement
    ) -> RayHandle:
        """Create the object; its constructor runs in the new process."""
        name = f"rollout_{placement.replica_rank}_{placement.node_rank}"
        settings = self._settings.named(name)
        log = ProcessLog.from_now(settings.log_path)
        strategy = "DEFAULT"
        if placement.node_id is not None:
            strategy = NodeAffinitySchedulingStrategy(placement.node_id, soft=False)
        actor = (
            ray.remote(ObjectHost)
            .options(
                num_cpus=0,
                max_concurrency=4096,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": {**_base_environment(), **env}},
            )
            .remote(cls, dict(kwargs), settings)
        )
        return RayHandle(actor, f"replica {placement.replica_rank}", log)


def _base_environment() -> dict[str, str]:
    # Ray sets OMP_NUM_THREADS=1 in actors without a CPU of their own; engines decide themselves.
    return {"OMP_NUM_THREADS": str(os.cpu_count() or 1), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
