"""What this package adds to vLLM's worker; called by the server through `collective_rpc`.

Imported in every engine worker before the model is loaded. It depends on torch, vLLM and rl_core
only, and gets everything else by message. Methods begin with `rl_`, since they are mixed into
vLLM's worker class.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from rl_core.errors import MiniRLError, WeightSyncError
from rl_rollout_vllm import cpu_patches, process_watch
from rl_rollout_vllm.load_sessions import BracketedSession, PlainSession
from rl_rollout_vllm.protocol import UpdateRequest, UpdateResult, WorkerError
from rl_rollout_vllm.weight_loading import Update, run_update
from rl_rollout_vllm.worker_memory import WorkerMemory

logger = logging.getLogger(__name__)

cpu_patches.install()


class RolloutWorkerExtension:
    """Mixed into vLLM's worker; `self` is the worker of one rank."""

    model_runner: Any
    rank: int

    def rl_update(self, requests: Sequence[bytes]) -> bytes:
        """Load one version; an encoded `UpdateResult`.

        Args:
            requests: encoded `UpdateRequest`s, one for each rank.
        """
        request = msgspec.msgpack.decode(requests[self.rank], type=UpdateRequest)
        kind = BracketedSession if request.load_path == "bracketed" else PlainSession
        try:
            result = UpdateResult(run_update(kind(self), Update.of(request)))
        except MiniRLError as error:
            logger.warning("update to %s failed: %s", request.manifest.version, error)
            result = UpdateResult(error=WorkerError.of(error))
        except Exception as error:  # edge of the process: the engine must not die of it
            logger.exception("update to %s failed", request.manifest.version)
            failure = WeightSyncError(f"{type(error).__name__}: {error}")
            result = UpdateResult(error=WorkerError.of(failure))
        return msgspec.msgpack.encode(result)

    def rl_release(self, tags: Sequence[str]) -> dict[str, int]:
        """Free memory on cpu; bytes by tag."""
        return {tag: self._rl_memory().release(tag) for tag in tags}

    def rl_resume(self, tags: Sequence[str]) -> None:
        """Allocate it again."""
        for tag in tags:
            self._rl_memory().resume(tag)

    def rl_attach(self, server_pid: int, scratch: str | None) -> dict[str, int]:
        """End with the server process; who and how this worker is."""
        process_watch.end_with(server_pid, scratch)
        return {"pid": os.getpid(), "threads": torch.get_num_threads(), "rank": self.rank}

    def rl_set_threads(self, count: int) -> None:
        """Set the number of compute threads."""
        # vLLM's CPU worker replaces torch.set_num_threads by a refusal.
        torch._C.set_num_threads(count)

    def rl_disable_patches(self, names: Sequence[str]) -> None:
        """Turn off CPU patches (tests only)."""
        cpu_patches.disable(names)

    def rl_poison(self) -> None:
        """Overwrite every parameter with NaN (tests only)."""
        for parameter in self.model_runner.model.parameters():
            parameter.data.fill_(float("nan"))

    def _rl_memory(self) -> WorkerMemory:
        memory: WorkerMemory | None = getattr(self, "_rl_worker_memory", None)
        if memory is None:
            memory = self._rl_worker_memory = WorkerMemory(self)
        return memory
