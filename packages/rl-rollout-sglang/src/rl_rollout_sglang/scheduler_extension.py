"""What this package adds to SGLang's schedulers; called by the server through `SchedulerLink`.

Lives in every scheduler process and runs on its main thread, between two batches. It depends on
torch, SGLang and rl_core only, and gets everything else by message.
"""

from __future__ import annotations

import logging
import os
import runpy
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.runtime_context import get_parallel

from rl_core.channel import connect
from rl_core.deadlines import Deadline
from rl_core.rollout import process_watch
from rl_core.rollout.weight_loading import Session, answer_update
from rl_rollout_sglang import cpu_plugin, live_digests, live_weights
from rl_rollout_sglang.cache_keys import rekeyed
from rl_rollout_sglang.load_sessions import BracketedSession, Loader, PlainSession
from rl_rollout_sglang.scheduler_protocol import BELL, SEGMENTS, Answer, Command, Hello
from rl_rollout_sglang.worker_memory import WorkerMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.channel import Channel

logger = logging.getLogger(__name__)

CONNECT_S = 60.0
COMMAND_S = 600.0


class SchedulerExtension:
    """One scheduler's end. Its public methods are what the server can call."""

    def __init__(self, address: str, key: bytes) -> None:
        """Remember the server's listener; connect at the first ring."""
        self._address = address
        self._key = key
        self._channel: Channel | None = None
        self._scheduler: Any = None

    def serve(self, scheduler: Any) -> None:
        """Read one command and answer it; called by SGLang when the server rings."""
        if self._channel is None:
            self._begin(scheduler)
        assert self._channel is not None
        command: Command = self._channel.receive(Deadline.after(COMMAND_S))
        self._channel.send(self._answer(command), Deadline.after(COMMAND_S))

    # -- what the server can call

    def update(self, request: bytes) -> bytes:
        """Load one version: an encoded `UpdateRequest`; an encoded `UpdateResult`."""
        return answer_update(request, self._session)

    def release(self, tags: Sequence[str]) -> dict[str, int]:
        """Free memory on cpu; bytes by tag."""
        return {tag: self._memory.release(tag) for tag in tags}

    def resume(self, tags: Sequence[str]) -> None:
        """Allocate it again."""
        for tag in tags:
            self._memory.resume(tag)

    def begin_cache_epoch(self, epoch: int) -> None:
        """Let requests that came and have not begun share no prefix of older epochs."""
        for request in self._scheduler.waiting_queue:
            request.extra_key = rekeyed(epoch, request.extra_key or "")

    def device_free(self) -> int:
        """Bytes that are free on this rank's accelerator."""
        return int(torch.get_device_module().mem_get_info()[0])

    def attach(self) -> None:
        """First call, when all ranks have come up: makes the connections.

        SGLang's shared memory is mapped by then, and would outlive an engine that is killed.
        """
        process_watch.unlink_segments(SEGMENTS)

    def attention_groups(self) -> int:
        """How often sequences were computed together so far (tests only)."""
        return cpu_plugin.attention_groups

    def disable_patches(self, names: Sequence[str]) -> None:
        """Turn off CPU patches (tests only)."""
        cpu_plugin.switch.disable(names)

    def live_digests(self) -> dict[str, str]:
        """Digests of what this rank computes with, by run-time name."""
        return live_digests.live_digests(self._model)

    def live_weights(self) -> dict[str, Any]:
        """The same, with how this rank runs: a `RankWeights` as plain data."""
        return live_weights.of_runner(self._scheduler.tp_worker.model_runner)

    def live_content(self, rank: int, name: str, start: int) -> bytes | None:
        """A piece of one rank's tensor, encoded; None from the others."""
        if rank != int(get_parallel().tp_rank):
            return None
        return live_digests.live_content(self._model, name, start)

    def flip(self, rank: int, name: str, position: float) -> None:
        """Flip one bit of a live tensor of one rank (tests only)."""
        if rank == int(get_parallel().tp_rank):
            live_digests.flip(self._model, name, position)

    def experiment(self, file: str, name: str) -> Any:
        """What a function of a Python file says of this rank's scheduler (tests only)."""
        function: Any = runpy.run_path(file)[name]
        return function(self._scheduler)

    def poison(self) -> None:
        """Overwrite every parameter with NaN (tests only)."""
        for parameter in self._model.parameters():
            parameter.data.fill_(float("nan"))

    def fail(self) -> None:
        """Make the scheduler raise outside of every guard (tests only)."""
        self._scheduler._engine_paused = _Bomb()

    # -- inside

    def _begin(self, scheduler: Any) -> None:
        deadline = Deadline.after(CONNECT_S)
        process_watch.outlive_parent()
        self._scheduler = scheduler
        self._model = scheduler.tp_worker.model_runner.model
        self._memory = WorkerMemory(scheduler)
        self._loader = Loader(scheduler)
        self._channel = connect(self._address, self._key, Command, deadline)
        rank = int(get_parallel().tp_rank)
        self._channel.send(Hello(rank, os.getpid(), torch.get_num_threads()), deadline)

    def _session(self, load_path: str) -> Session:
        kind = BracketedSession if load_path == "bracketed" else PlainSession
        return kind(self._scheduler, self._loader)

    def _answer(self, command: Command) -> Answer:
        try:
            if command.method.startswith("_") or command.method == "serve":
                return Answer(command.number, failure=f"no method {command.method!r}")
            arguments = msgspec.msgpack.decode(command.arguments)
            value = getattr(self, command.method)(*arguments)
            return Answer(command.number, msgspec.msgpack.encode(value))
        except Exception as error:  # edge of the process: SGLang would end everything
            logger.exception("%r failed", command.method)
            return Answer(command.number, failure=f"{type(error).__name__}: {error}")


class _Bomb:
    """A flag that cannot be read."""

    def __bool__(self) -> bool:
        raise RuntimeError("a test asked the scheduler to fail")


def install(address: str, key: bytes) -> None:
    """Give SGLang's scheduler the method that the server rings. Once in each scheduler process."""
    from sglang.srt.managers.scheduler import Scheduler

    extension = SchedulerExtension(address, key)

    def rl_serve(scheduler: Any) -> None:
        extension.serve(scheduler)

    setattr(Scheduler, BELL, rl_serve)
