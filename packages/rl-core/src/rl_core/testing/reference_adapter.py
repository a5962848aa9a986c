"""The reference rollout adapter: a complete, plain implementation of `RolloutAdapter`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rl_core.deadlines import Deadline
from rl_core.errors import LifecycleError, MiniRLError, StaleVersionError, TransferTimeoutError
from rl_core.interfaces import (
    BucketLease,
    Handle,
    LeasedTensor,
    LiveContent,
    LoadReport,
    PauseMode,
    RolloutAdapter,
)
from rl_core.metadata import Manifest, ManifestCheck
from rl_core.rollout.weight_checks import ArrivalChecks, check_supported
from rl_core.testing.reference_config import ReferenceConfig
from rl_core.torch import as_bytes
from rl_core.trajectory import Completion, GenerateRequest
from rl_core.versions import PolicyVersion


class ReferenceAdapter(RolloutAdapter):
    """Feeds one tensor-parallel rank of a reference server through its handle."""

    def __init__(self, server: Handle, tp_rank: int, config: ReferenceConfig) -> None:
        self._server = server
        self._tp_rank = tp_rank
        self._config = config
        self.on_update = config.on_update

    def release(self, tags: Sequence[str], timeout: float) -> dict[str, int]:
        """Free memory of the replica."""
        freed: dict[str, int] = self._call("release", tuple(tags), timeout=timeout)
        return freed

    def resume(self, tags: Sequence[str], timeout: float) -> None:
        """Allocate it again."""
        self._call("resume", tuple(tags), timeout=timeout)

    def update_weights(
        self, leases: Iterator[BucketLease], manifest: Manifest, deadline: Deadline
    ) -> LoadReport:
        """Load one version into this rank."""
        left = deadline.remaining()
        wanted = self._tp_rank, manifest, self.on_update, left
        # A refusal comes before anything is touched: the replica goes on as it was.
        with self._fencing(unless=(StaleVersionError, LifecycleError)):
            answer_s = left + self._config.call_timeout_s
            attempt = self._call("begin_update", *wanted, timeout=answer_s)
        try:
            with self._fencing():
                return self._stream(leases, manifest, attempt, deadline)
        except MiniRLError:
            self.drain(leases)
            raise

    def update_weights_from_disk(
        self, path: Path, manifest: Manifest, deadline: Deadline
    ) -> LoadReport:
        """Load one version into all ranks from a directory."""
        started, left = time.monotonic(), deadline.remaining()
        with self._fencing(unless=(StaleVersionError, LifecycleError)):
            self._call("load_directory", path, manifest, self.on_update, left, timeout=left)
        seconds = {"load": time.monotonic() - started}
        return LoadReport(manifest.version, len(manifest.tensors), manifest.nbytes, seconds)

    def commit(self, version: PolicyVersion, timeout: float) -> None:
        """Flush the KV cache and serve `version`."""
        self._call("commit", version, timeout=timeout)

    def fence(self, reason: str, timeout: float) -> None:
        """Refuse requests, with `reason`."""
        self._call("fence", reason, timeout=timeout)

    def tokens_made(self, timeout: float) -> int:
        """Tokens since the server began."""
        count: int = self._call("tokens_made", timeout=timeout)
        return count

    def finished(self, request_ids: Sequence[str], wait: float, timeout: float) -> list[Completion]:
        """Those of `generate` calls under way that have ended."""
        found: list[Completion] = self._call("finished", list(request_ids), wait, timeout=timeout)
        return found

    def clear_kv_cache(self, timeout: float) -> None:
        """Drop cached prefixes."""
        self._call("clear_kv_cache", timeout=timeout)

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop scheduling."""
        self._call("pause", mode, timeout, timeout=timeout + self._config.call_timeout_s)

    def continue_(self, timeout: float) -> None:
        """Go on after `pause`."""
        self._call("continue_", timeout=timeout)

    def generate(self, requests: Sequence[GenerateRequest], timeout: float) -> list[Completion]:
        """Complete all requests, in order."""
        completions: list[Completion] = self._call("generate", list(requests), timeout=timeout)
        return completions

    def committed_version(self, timeout: float) -> PolicyVersion | None:
        """The version that is served, None if none is."""
        version: PolicyVersion | None = self._call("committed_version", timeout=timeout)
        return version

    def live_digests(self, timeout: float) -> list[dict[str, str]]:
        """Digests of what the ranks compute with."""
        found: list[dict[str, str]] = self._call("live_digests", timeout=timeout)
        return found

    def live_content(self, tp_rank: int, name: str, start: int, timeout: float) -> LiveContent:
        """A piece of what one rank computes with."""
        content: LiveContent = self._call("live_content", tp_rank, name, start, timeout=timeout)
        return content

    def _stream(
        self, leases: Iterator[BucketLease], manifest: Manifest, attempt: int, deadline: Deadline
    ) -> LoadReport:
        check_supported(manifest)
        check, checks = ManifestCheck(manifest), ArrivalChecks(manifest, check_finite=False)
        started = time.monotonic()
        for lease in leases:
            with lease as entries:
                deadline.check(f"a bucket of {manifest.version}")
                for entry in entries:
                    check.see(entry.meta)
                    checks.see(entry)
                self.send(entries, attempt, deadline)
        check.close()
        deadline.check(f"the end of {manifest.version}")
        left = deadline.remaining()
        answer_s = left + self._config.call_timeout_s
        self._call("finish_update", self._tp_rank, attempt, left, timeout=answer_s)
        return checks.report({"load": time.monotonic() - started})

    def send(self, entries: Sequence[LeasedTensor], attempt: int, deadline: Deadline) -> None:
        """Have the engine load a bucket; returns when it has, so that the buffer is free."""
        parts = [(entry.meta, as_bytes(entry.tensor).numpy().tobytes()) for entry in entries]
        self._call("load", self._tp_rank, attempt, parts, timeout=deadline.remaining())

    def drain(self, leases: Iterator[BucketLease]) -> None:
        """Take part in producing weights to the end; what goes wrong now hides no cause."""
        with suppress(Exception):
            for lease in leases:
                with lease:
                    pass

    @contextmanager
    def _fencing(self, unless: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Fence the replica whatever the block raises: half a version may be loaded."""
        try:
            yield
        except unless:
            raise
        except BaseException as error:
            self.fence(f"{type(error).__name__}: {error}", self._config.call_timeout_s)
            raise

    def _call(self, method: str, *args: Any, timeout: float) -> Any:
        try:
            return self._server.call(method, *args, timeout=timeout)
        except MiniRLError:
            raise
        except TimeoutError as error:
            msg = f"the server did not answer {method} within {timeout:.1f} s"
            raise TransferTimeoutError(msg) from error
