"""The adapter: feeds one engine rank with weights, and reaches the replica's server for the rest.

Lives in the process that holds the weights (an actor rank, or a checkpoint worker).
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from rl_core.channel import Listener, new_key
from rl_core.deadlines import Deadline
from rl_core.errors import (
    MessageError,
    MiniRLError,
    RolloutError,
    TransferError,
    TransferTimeoutError,
)
from rl_core.interfaces import PauseMode, RolloutAdapter
from rl_core.rollout.bucket_sender import BucketSender, BufferPool
from rl_core.rollout.lease_source import LeaseSource, SourceFailedError
from rl_core.rollout.protocol import FromWorker, Offer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rl_core.channel import Channel
    from rl_core.interfaces import BucketLease, Handle, LiveContent, LoadReport, Pending
    from rl_core.metadata import Manifest
    from rl_core.rollout.config import EngineConfig
    from rl_core.trajectory import Completion, GenerateRequest
    from rl_core.versions import PolicyVersion

logger = logging.getLogger(__name__)

POLL_S = 0.1
FAR_SIDE_SHARE = 0.9
"""Share of a deadline given to the server and the worker, so that their errors, which name the
cause, arrive before this side gives up."""


class StreamingAdapter(RolloutAdapter):
    """Puts weights into one rank of a replica whose server is a `RolloutServer`."""

    def __init__(self, server: Handle, tp_rank: int, config: EngineConfig) -> None:
        self._server = server
        self._tp_rank = tp_rank
        self._pool = BufferPool(config.bucket_megabytes)
        self.on_update = PauseMode(config.on_update)

    # -- weights

    def update_weights(
        self, leases: Iterator[BucketLease], manifest: Manifest, deadline: Deadline
    ) -> LoadReport:
        """Load one complete version into this rank; as `RolloutAdapter.update_weights`.

        The leases are consumed to their end also after a failure, since producing them is a
        collective; what the leases raise themselves comes through.
        """
        source, failed = LeaseSource(leases), True
        try:
            report = self._update(source, manifest, deadline)
            failed = False
        except SourceFailedError as error:
            raise error.cause from None
        finally:
            source.drain(failed=failed)
        return report

    def update_weights_from_disk(
        self, path: Path, manifest: Manifest, deadline: Deadline
    ) -> LoadReport:
        """As `update_weights`, from a Hugging Face directory. Rank 0 calls it for the replica."""
        left = deadline.remaining()
        arguments = str(path), manifest, left * FAR_SIDE_SHARE, self.on_update
        report: LoadReport = self._call("receive_directory", *arguments, timeout=left)
        return report

    def commit(self, version: PolicyVersion, timeout: float) -> None:
        """Flush the KV cache, and let requests in.

        The message carries the attempt that is there now: one that comes late, when the same
        version is being loaded again, is refused.
        """
        deadline = Deadline.after(timeout)
        attempt = self._call("attempt", timeout=timeout)
        self._call("commit", version, attempt, timeout=deadline.remaining())

    def fence(self, reason: str, timeout: float) -> None:
        """Refuse all requests, with `reason`, until the next commit."""
        self._call("fence", reason, timeout=timeout)

    def committed_version(self, timeout: float) -> PolicyVersion | None:
        """The version that is being served."""
        version: PolicyVersion | None = self._call("committed_version", timeout=timeout)
        return version

    def live_digests(self, timeout: float) -> list[dict[str, str]]:
        """Digests of what the engine computes with, by run-time name, for every rank."""
        found: list[dict[str, str]] = self._call("live_digests", timeout=timeout)
        return found

    def live_content(self, tp_rank: int, name: str, start: int, timeout: float) -> LiveContent:
        """A piece of a tensor that one rank computes with, from byte `start` on."""
        content: LiveContent = self._call("live_content", tp_rank, name, start, timeout=timeout)
        return content

    # -- memory

    def release(self, tags: Sequence[str], timeout: float) -> dict[str, int]:
        """Free the memory of `kv_cache` and/or `weights`; bytes freed by tag, over all ranks."""
        freed: dict[str, int] = self._call("release", list(tags), timeout=timeout)
        return freed

    def resume(self, tags: Sequence[str], timeout: float) -> None:
        """Allocate again what `release` freed; weights come back empty."""
        self._call("resume", list(tags), timeout=timeout)

    # -- requests

    def generate(self, requests: Sequence[GenerateRequest], timeout: float) -> list[Completion]:
        """Complete all requests, in order, each `sampling.n` times."""
        completions: list[Completion] = self._call("generate", list(requests), timeout=timeout)
        return completions

    def tokens_made(self, timeout: float) -> int:
        """Tokens since the server began, of all requests, also of those under way."""
        count: int = self._call("tokens_made", timeout=timeout)
        return count

    def finished(self, request_ids: Sequence[str], wait: float, timeout: float) -> list[Completion]:
        """Those of `generate` calls under way that have ended."""
        found: list[Completion] = self._call("finished", list(request_ids), wait, timeout=timeout)
        return found

    def clear_kv_cache(self, timeout: float) -> None:
        """Drop cached prefixes; RolloutError unless the engine confirms it."""
        self._call("clear_kv_cache", timeout=timeout)

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop scheduling; requests in flight end or stay as `mode` says, new ones queue."""
        self._call("pause", mode, timeout * FAR_SIDE_SHARE, timeout=timeout)

    def continue_(self, timeout: float) -> None:
        """Go on after `pause`."""
        self._call("continue_", timeout=timeout)

    # -- the stream

    def _update(self, source: LeaseSource, manifest: Manifest, deadline: Deadline) -> LoadReport:
        key = new_key()
        with Listener() as listener:
            seconds = deadline.remaining() * FAR_SIDE_SHARE
            offer = Offer(self._tp_rank, listener.address, key, manifest, seconds, self.on_update)
            pending = self._server.submit("receive_update", offer)
            with self._accepted(listener, key, pending, deadline) as channel:
                sender = BucketSender(channel, manifest, self._pool, deadline)
                failure = _stream(sender, source)
                if failure is not None:
                    # The other ranks are fed, and so the server's report comes, only as long as
                    # this one takes its part in producing what it has no use for any more.
                    source.drain(failed=True)
                return _outcome(pending, deadline, failure)

    def _accepted(
        self, listener: Listener, key: bytes, pending: Pending, deadline: Deadline
    ) -> Channel:
        """The worker's connection; the server's error if it answers that instead."""
        while True:
            if listener.poll(POLL_S):
                try:
                    return listener.accept(key, FromWorker, deadline)
                except MessageError as error:
                    logger.warning("a stranger connected: %s", error)
                    continue
            if deadline.expired:
                raise TransferTimeoutError("deadline passed while waiting for the engine's worker")
            _raise_if_over(pending)

    def _call(self, method: str, *args: Any, timeout: float) -> Any:
        try:
            return self._server.call(method, *args, timeout=timeout)
        except MiniRLError:
            raise
        except TimeoutError as error:
            msg = f"the rollout server did not answer {method!r} in {timeout:.1f} s"
            raise RolloutError(msg) from error


def _stream(sender: BucketSender, source: LeaseSource) -> MiniRLError | None:
    """Send everything; what went wrong, if anything did. The worker is told, if it listens."""
    try:
        sender.send(source)
    except MiniRLError as error:
        if not isinstance(error, TransferError):
            with contextlib.suppress(TransferError):
                sender.abort(str(error))
        return error
    return None


def _raise_if_over(pending: Pending) -> None:
    """Raise the server's error if it has ended an update that has not begun to stream."""
    try:
        pending.result(0)
    except MiniRLError:
        raise
    except TimeoutError:
        return
    raise TransferError("the server ended the update without reading the stream")


def _outcome(pending: Pending, deadline: Deadline, failure: MiniRLError | None) -> LoadReport:
    """What the server says of the update, when it has ended there.

    Args:
        pending: the server's call.
        deadline: by when it must have ended.
        failure: what went wrong on this side, if anything did.

    Errors: `failure` if it began on this side; else the server's, which knows better why a
    connection broke; else TransferTimeoutError.
    """
    mine = failure is not None and not isinstance(failure, TransferError)
    try:
        report: LoadReport = pending.result(max(deadline.remaining(), 1.0))
    except MiniRLError as error:
        if failure is not None and mine:
            raise failure from error
        raise
    except TimeoutError as error:
        msg = "deadline passed while waiting for the server's report"
        raise (failure or TransferTimeoutError(msg)) from error
    if failure is not None:
        raise failure
    return report
