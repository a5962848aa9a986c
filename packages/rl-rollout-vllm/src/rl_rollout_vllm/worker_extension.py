"""What this package adds to vLLM's worker; called by the server through `collective_rpc`.

Imported in every engine worker before the model is loaded. It depends on torch, vLLM and rl_core
only, and gets everything else by message. Methods begin with `rl_`, since they are mixed into
vLLM's worker class.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl_core.rollout import process_watch
from rl_core.rollout.protocol import KV_CACHE
from rl_core.rollout.weight_loading import Session, answer_update
from rl_rollout_vllm import cpu_patches, live_digests, live_weights
from rl_rollout_vllm.load_sessions import BracketedSession, PlainSession
from rl_rollout_vllm.server_args import COLLECTIVE_SEGMENTS, QUEUE_SEGMENTS
from rl_rollout_vllm.worker_memory import WorkerMemory

logger = logging.getLogger(__name__)

cpu_patches.install()


class RolloutWorkerExtension:
    """Mixed into vLLM's worker; `self` is the worker of one rank."""

    model_runner: Any
    rank: int
    distributed_init_method: str

    def rl_answer(self, method: str, args: Sequence[Any]) -> tuple[bool, Any]:
        """Call one of the other methods; (True, its value), or (False, what it raised).

        Raised here, vLLM (seen in 0.32) would not read what the ranks after this one answer, and
        take that for their answers to the next call.
        """
        try:
            return True, getattr(self, method)(*args)
        except Exception as error:
            logger.exception("%s failed on rank %d", method, self.rank)
            return False, f"{type(error).__name__}: {error}"

    def rl_update(self, requests: Sequence[bytes]) -> bytes:
        """Load one version; an encoded `UpdateResult`.

        Args:
            requests: encoded `UpdateRequest`s, one for each rank.
        """
        return answer_update(requests[self.rank], self._rl_session)

    def rl_release(self, tags: Sequence[str]) -> dict[str, int]:
        """Free memory on cpu; bytes by tag."""
        return {tag: self._rl_memory().release(tag) for tag in tags}

    def rl_resume(self, tags: Sequence[str]) -> None:
        """Allocate it again."""
        for tag in tags:
            self._rl_memory().resume(tag)

    def rl_clear_kv_memory(self) -> None:
        """Zero the KV cache on cpu; no request may be using it.

        A NaN left there would come back: the attention kernel multiplies what it masks by 0.
        """
        self._rl_memory().clear(KV_CACHE)

    def rl_device_free(self) -> int:
        """Bytes that are free on this rank's accelerator."""
        return int(torch.get_device_module().mem_get_info()[0])

    def rl_attach(self, server_pid: int, scratch: str | None) -> dict[str, int]:
        """End with the server process; who and how this worker is."""
        process_watch.end_with(server_pid, scratch, QUEUE_SEGMENTS)
        # What the ranks found each other by: all have by now, and vLLM never removes it.
        process_watch.unlink_segments(COLLECTIVE_SEGMENTS)
        Path(self.distributed_init_method.removeprefix("file://")).unlink(missing_ok=True)
        return {"pid": os.getpid(), "threads": torch.get_num_threads(), "rank": self.rank}

    def rl_set_threads(self, count: int) -> None:
        """Set the number of compute threads."""
        # vLLM's CPU worker replaces torch.set_num_threads by a refusal.
        torch._C.set_num_threads(count)

    def rl_disable_patches(self, names: Sequence[str]) -> None:
        """Turn off CPU patches (tests only)."""
        cpu_patches.switch.disable(names)

    def rl_live_digests(self) -> dict[str, str]:
        """Digests of what this rank computes with, by run-time name."""
        return live_digests.live_digests(self.model_runner.model)

    def rl_live_weights(self) -> dict[str, Any]:
        """The same, with how this rank runs: a `RankWeights` as plain data."""
        return live_weights.of_worker(self)

    def rl_live_content(self, rank: int, name: str, start: int) -> bytes | None:
        """A piece of one rank's tensor, encoded; None from the others."""
        if rank != self.rank:
            return None
        return live_digests.live_content(self.model_runner.model, name, start)

    def rl_flip(self, rank: int, name: str, position: float) -> None:
        """Flip one bit of a live tensor of one rank (tests only)."""
        if rank == self.rank:
            live_digests.flip(self.model_runner.model, name, position)

    def rl_poison(self, names: Sequence[str] | None = None) -> None:
        """Overwrite parameters with NaN: all, or those of these names (tests only)."""
        model = self.model_runner.model
        chosen = model.parameters() if names is None else map(model.get_parameter, names)
        for parameter in chosen:
            parameter.data.fill_(float("nan"))

    def _rl_session(self, load_path: str) -> Session:
        return BracketedSession(self) if load_path == "bracketed" else PlainSession(self)

    def _rl_memory(self) -> WorkerMemory:
        memory: WorkerMemory | None = getattr(self, "_rl_worker_memory", None)
        if memory is None:
            memory = self._rl_worker_memory = WorkerMemory(self)
        return memory
