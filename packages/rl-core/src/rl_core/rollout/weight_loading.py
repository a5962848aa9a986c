"""One weight update in an engine worker: receive, check, load; whole or not at all.

How tensors enter the model is a `Session`, which the backend brings.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from rl_core.deadlines import Deadline
from rl_core.errors import MiniRLError, WeightSyncError
from rl_core.rollout.bucket_receiver import BucketReceiver
from rl_core.rollout.protocol import FromSocket, UpdateRequest, UpdateResult, WorkerError
from rl_core.rollout.weight_checks import ArrivalChecks, check_supported
from rl_core.rollout.weights_directory import DirectoryReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_core.interfaces import LoadReport
    from rl_core.rollout.bucket_receiver import Arrival


logger = logging.getLogger(__name__)


@dataclass
class Update:
    """One version being received by one rank, shared by the steps of the load.

    Attributes:
        request: what to load.
        deadline: by when.
        seconds: time by phase, filled in on the way.
    """

    request: UpdateRequest
    deadline: Deadline
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, request: UpdateRequest) -> Update:
        """Start the clock."""
        return cls(request, Deadline.after(request.seconds))


class Session(Protocol):
    """A load path: `begin`, any number of `load`, then `finish` or `abandon`."""

    def begin(self) -> None:
        """Prepare the model."""

    def load(self, arrivals: Sequence[Arrival]) -> None:
        """Load some tensors; lent ones are overwritten afterwards."""

    def finish(self) -> None:
        """Complete the load; ManifestMismatchError if the model got less than it needs."""

    def abandon(self) -> None:
        """Leave the model in a state from which a complete load repairs it."""


def answer_update(encoded: bytes, session_for: Callable[[str], Session]) -> bytes:
    """Carry out one rank's encoded `UpdateRequest`; an encoded `UpdateResult`. Raises nothing.

    Args:
        encoded: the request.
        session_for: makes the session of a load path, `bracketed` or `plain`.
    """
    request = msgspec.msgpack.decode(encoded, type=UpdateRequest)
    try:
        report = run_update(session_for(request.load_path), Update.of(request))
        return msgspec.msgpack.encode(UpdateResult(report))
    except MiniRLError as error:
        logger.warning("update to %s failed: %s", request.manifest.version, error)
        return msgspec.msgpack.encode(UpdateResult(error=WorkerError.of(error)))
    except Exception as error:  # edge of the process: the engine must not die of it
        logger.exception("update to %s failed", request.manifest.version)
        failure = WeightSyncError(_described(error))
        return msgspec.msgpack.encode(UpdateResult(error=WorkerError.of(failure)))


def run_update(session: Session, update: Update) -> LoadReport:
    """Receive, check and load one version.

    Errors: WeightSyncError or VerificationError; the model is then a mixture and must not serve.
    """
    manifest = update.request.manifest
    checks = ArrivalChecks(manifest, check_finite=update.request.check_finite)
    try:
        check_supported(manifest)
        session.begin()
        _stream(session, update, checks)
        started = time.perf_counter()
        session.finish()
        update.seconds["post_process"] = time.perf_counter() - started
    except MiniRLError as error:
        session.abandon()
        error.counting(checks.so_far)
        raise
    except Exception as error:
        session.abandon()
        msg = f"the engine could not load {manifest.version}: {_described(error)}"
        raise WeightSyncError(msg).counting(checks.so_far) from error
    return checks.report(update.seconds)


def _stream(session: Session, update: Update, checks: ArrivalChecks) -> None:
    request = update.request
    started = time.perf_counter()
    if isinstance(request.source, FromSocket):
        with BucketReceiver(request.source, request.manifest, update.deadline) as receiver:
            _load_batches(session, receiver, checks)
            wire = receiver.wire_seconds
    else:
        reader = DirectoryReader(request.source.path, request.manifest, update.deadline)
        _load_batches(session, reader, checks)
        wire = 0.0
    update.seconds["wire"] = wire
    update.seconds["load"] = time.perf_counter() - started - wire


def _load_batches(
    session: Session, source: BucketReceiver | DirectoryReader, checks: ArrivalChecks
) -> None:
    for arrivals in source.batches():
        for arrival in arrivals:
            checks.see(arrival)
        session.load(arrivals)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
