"""The only place that touches SGLang's engine object; imported in the server process only.

Everything that SGLang raises leaves this module as an error of `rl_core.errors`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import zmq
from sglang.srt.managers import io_struct

from rl_core.errors import RolloutError
from rl_core.interfaces import LiveContent, LiveWeights, PauseMode, Placement
from rl_core.rollout.config import choose_load_path
from rl_core.rollout.live_ranks import together
from rl_core.trajectory import Completion, GenerateRequest
from rl_core.versions import PolicyVersion
from rl_rollout_sglang import cpu_plugin, engine_launch, engine_processes, trajectories
from rl_rollout_sglang.checked_manager import CheckedTokenizerManager, QuietSignals
from rl_rollout_sglang.config import SglangConfig
from rl_rollout_sglang.engine_processes import LaunchedEngine, ProcessSetup
from rl_rollout_sglang.pause_condition import EndedWaitError, PauseCondition
from rl_rollout_sglang.scheduler_link import SchedulerLink
from rl_rollout_sglang.scheduler_protocol import BELL
from rl_rollout_sglang.seed_notice import SeedNotice

logger = logging.getLogger(__name__)

HAS_BRACKET = hasattr(io_struct, "BeginWeightUpdateReqInput")
POLL_S = 0.005
REAP_S = 1.0
SCHEDULER_PAUSES = {PauseMode.KEEP: "retract", PauseMode.IN_PLACE: "in_place"}
"""SGLang's names of the pauses that its schedulers carry out."""

FLUSH_S = 5.0
"""Seconds for requests in flight to end before a flush."""
BELL_MS = 30_000
"""Milliseconds for a ring to go out, and for SGLang's reply to it, which comes after ours."""


def load_path(wanted: str) -> Literal["bracketed", "plain"]:
    """The load path to use, for a configured one of `auto`, `bracketed` or `plain`.

    Errors: IncompatibleVersionError if `bracketed` is wanted and this SGLang cannot do it.
    """
    return choose_load_path(
        wanted, None if HAS_BRACKET else "this SGLang has no weight-update session"
    )


class SglangEngine:
    """A running SGLang engine with its processes."""

    def __init__(
        self, engine: LaunchedEngine, link: SchedulerLink, setup: ProcessSetup, config: SglangConfig
    ) -> None:
        self._engine = engine
        self._link = link
        self._setup = setup
        self._manager: CheckedTokenizerManager = engine.tokenizer_manager
        self._calling = asyncio.Lock()
        self._died = asyncio.get_running_loop().create_future()
        self._on_cpu = False
        self._in_place = False
        self.workers: list[dict[str, int]] = []
        self.load_path = load_path(config.load_path)

    # -- life cycle

    @classmethod
    async def start(
        cls, config: SglangConfig, placement: Placement, scratch: str
    ) -> "SglangEngine":
        """Start the engine's processes and wait until they have a model.

        Blocks the event loop while they come up. The caller's process must be single-minded: the
        engine is forked from it on cpu.

        Args:
            config: settings.
            placement: where.
            scratch: directory for the engine's sockets, removed by the last process.

        Errors: ConfigError (a value that SGLang refuses), LifecycleError (it did not come up).
        """
        engine, link, setup = await engine_launch.launch(config, placement, scratch)
        started = cls(engine, link, setup, config)
        await started._attach(placement.device == "cpu")
        return started

    async def _attach(self, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self._manager.signal_handler_class = QuietSignals
        deterministic = bool(self._engine.server_args.enable_deterministic_inference)
        self._manager.is_pause_cond = PauseCondition()
        self._manager.seeds = SeedNotice(
            lambda: deterministic or cpu_plugin.active("seeded_sampling")
        )
        self._manager.auto_create_handle_loop()
        loop = asyncio.get_running_loop()
        for process in self._engine.processes:
            loop.add_reader(process.sentinel, self._note_death, process)
        await self.call("attach")
        self.workers = [
            {"pid": peer.pid, "threads": peer.threads, "rank": peer.rank}
            for peer in self._link.peers
        ]

    def publish(self, http: Any, refusal: Callable[[], str | None]) -> None:
        """Give the engine to SGLang's HTTP module; `refusal` says why nothing is served."""
        self._manager.is_pause_cond.refusal = refusal
        scheduler = self._engine._scheduler_init_result.scheduler_infos[0]
        state = http._GlobalState(
            tokenizer_manager=self._manager,
            template_manager=self._engine.template_manager,
            scheduler_info=scheduler,
        )
        http.set_global_state(state)
        http.app.is_single_tokenizer_mode = True
        http.app.server_args = self._engine.server_args
        http.app.warmup_thread_kwargs = {"server_args": self._engine.server_args}

    @property
    def alive(self) -> bool:
        """Whether all of the engine's processes are there."""
        return not self._died.done()

    async def ended(self) -> None:
        """Return once one of the engine's processes has ended."""
        await asyncio.shield(self._died)

    @property
    def last_words(self) -> str:
        """How the first of the engine's processes ended, and the errors that they logged last."""
        how = str(self._died.result()) if self._died.done() else ""
        words = engine_processes.last_words(self._setup.scratch)
        # The first line says it all where only one is shown: the error is the last thing said.
        return f"{how}: {words.splitlines()[-1]}\n{words}" if words else how

    async def shutdown(self) -> None:
        """End the engine's processes."""
        loop = asyncio.get_running_loop()
        for process in self._engine.processes:
            loop.remove_reader(process.sentinel)
        self._link.close()
        await asyncio.to_thread(self._engine.shutdown)
        for task in list(self._manager.asyncio_tasks):
            task.cancel()

    def _note_death(self, process: Any) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join(REAP_S)  # its end is seen a moment before its exit code
        if not self._died.done():
            self._died.set_result(f"process {process.pid} ended with exit code {process.exitcode}")

    # -- requests

    async def generate(
        self, request: GenerateRequest, committed: PolicyVersion | None
    ) -> Completion:
        """Complete one request, admitted while `committed` was served; RolloutError."""
        vocab_size = self._manager.model_config.vocab_size
        arguments = trajectories.request_arguments(request, vocab_size)
        stream = self._manager.generate_request(io_struct.GenerateReqInput(**arguments), None)
        with _translated(f"complete request {request.request_id}"):
            try:
                output = await self._while_alive(_last(stream))
            except EndedWaitError:
                return Completion(request.request_id, [], [], "abort", [])
        if output is None:
            raise RolloutError(f"request {request.request_id} ended without an output")
        return trajectories.completion_of(request, output, committed)

    def tokens_underway(self) -> int:
        """Tokens of unfinished requests, which the scheduler tells of every 50 tokens."""
        return sum(len(state.output_ids) for state in self._manager.rid_to_state.values())

    async def _while_alive(self, work: Any) -> Any:
        """The result of `work`, or RolloutError as soon as the engine has died."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._died}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise RolloutError(f"the engine died: {self.last_words}")
            return task.result()
        finally:
            task.cancel()

    async def pause(self, mode: PauseMode) -> None:
        """Stop scheduling; kept requests compute their KV again later, unless it is in place."""
        with _translated("pause"):
            if mode in SCHEDULER_PAUSES:
                await self._pause_schedulers(mode)
                return
            if self._in_place:
                # They would never end: what is paused in place takes no step, not even its last.
                await self._pause_schedulers(PauseMode.KEEP)
            async with self._manager.is_pause_cond:
                self._manager.is_pause = True
            await self._while_alive(self._drain(abort=mode is PauseMode.ABORT))
            if mode is PauseMode.ABORT:
                await self._manager.is_pause_cond.end_waiting()

    async def _pause_schedulers(self, mode: PauseMode) -> None:
        request = io_struct.PauseGenerationReqInput(mode=SCHEDULER_PAUSES[mode])
        await self._while_alive(self._manager.pause_generation(request))
        self._in_place = mode is PauseMode.IN_PLACE

    async def _drain(self, *, abort: bool) -> None:
        """Wait until no request is in the engine, ending them if asked."""
        # SGLang's own way of aborting looks again only after a second.
        while await self._manager.busy():
            if abort:
                self._manager.abort_request(abort_all=True)
            await asyncio.sleep(POLL_S)

    async def resume(self) -> None:
        """Schedule again."""
        self._in_place = False
        with _translated("resume"):
            await self._manager.continue_generation(
                io_struct.ContinueGenerationReqInput(torch_empty_cache=False)
            )

    async def clear_kv_cache(self) -> None:
        """Drop cached prefixes; RolloutError unless the engine confirms it.

        Requests that are paused in place keep their own. Nobody else reaches it (`cache_keys`).
        """
        self._manager.cache_epoch += 1
        if self._in_place:
            await self.call("begin_cache_epoch", self._manager.cache_epoch)
        with _translated("flush"):
            output = await self._while_alive(self._manager.flush_cache())
            if not output.success and self._in_place:
                return
            if not output.success:
                # Requests that were just answered count as running until the next batch is made.
                output = await self._while_alive(self._manager.flush_cache(timeout_s=FLUSH_S))
        if not output.success:
            raise RolloutError("the engine did not confirm that its KV cache was flushed")

    async def zero_kv_cache(self) -> None:
        """Not needed: the attention for cpu reads the tokens of one request and no others."""

    async def set_version(self, version: str) -> None:
        """Stamp tokens with `version` from here on."""
        request = io_struct.UpdateWeightVersionReqInput(
            new_version=version, abort_all_requests=False
        )
        with _translated("set the version"):
            await self._while_alive(self._manager.update_weight_version(request))

    # -- processes

    async def update(self, requests: Sequence[bytes]) -> list[bytes]:
        """Run one weight update on every rank; an encoded `UpdateResult` of each."""
        return await self._call("update", [[request] for request in requests])

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `SchedulerExtension` on every rank; results in rank order."""
        return await self._call(method, [list(args)] * self._engine.server_args.tp_size)

    async def _call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        if not self.alive:
            raise RolloutError(f"the engine died; cannot {method}: {self.last_words}")
        with _translated(method):
            async with self._calling:
                return await asyncio.to_thread(self._exchange, method, arguments)

    def _exchange(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        bell = self._engine.send_to_rpc
        results = self._link.call(method, arguments, self._ring)
        if bell.poll(BELL_MS):
            io_struct.sock_recv(bell)
        return results

    def _ring(self) -> None:
        bell = self._engine.send_to_rpc
        if not bell.poll(BELL_MS, zmq.POLLOUT):  # right after the start nobody is connected yet
            raise RolloutError("the engine's scheduler does not listen")
        io_struct.sock_send(bell, io_struct.RpcReqInput(method=BELL))

    async def live_digests(self) -> list[dict[str, str]]:
        """Digests of what every rank computes with, by run-time name, in rank order."""
        return await self.call("live_digests")

    async def live_weights(self) -> LiveWeights:
        """The same, with how the engine runs."""
        return together("sglang", await self.call("live_weights"))

    async def live_content(self, tp_rank: int, name: str, start: int) -> LiveContent | None:
        """A piece of a tensor that rank `tp_rank` computes with; None if it has no such tensor."""
        answers = await self.call("live_content", tp_rank, name, start)
        found = answers[tp_rank]
        return None if found is None else msgspec.msgpack.decode(found, type=LiveContent)

    async def release(self, tags: Sequence[str]) -> dict[str, int]:
        """Free memory; bytes over all ranks by tag that could be freed.

        On cpu by our scheduler extension, on accelerators by SGLang's memory saver (never run: no
        such hardware was at hand).
        """
        # Cached prefixes lie in the memory that goes.
        await self.clear_kv_cache()
        if self._on_cpu:
            ranks = await self.call("release", list(tags))
            freed = {tag: sum(rank[tag] for rank in ranks) for tag in tags}
            return {tag: nbytes for tag, nbytes in freed.items() if nbytes}
        before = sum(await self.call("device_free"))
        request = io_struct.ReleaseMemoryOccupationReqInput(tags=list(tags))
        with _translated("release memory"):
            await self._while_alive(self._manager.release_memory_occupation(request, None))
        nbytes = max(0, sum(await self.call("device_free")) - before)
        # The device tells only the sum; it is booked on the first tag.
        return dict.fromkeys(tags, 0) | {tags[0]: nbytes}

    async def restore(self, tags: Sequence[str]) -> None:
        """Allocate again what `release` freed."""
        if self._on_cpu:
            await self.call("resume", list(tags))
            return
        request = io_struct.ResumeMemoryOccupationReqInput(tags=list(tags))
        with _translated("resume memory"):
            await self._while_alive(self._manager.resume_memory_occupation(request, None))


async def _last(stream: AsyncIterator[Any]) -> Any:
    last = None
    async for output in stream:
        last = output
    return last


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except RolloutError:
        raise
    except Exception as error:
        # Edge of the engine: what fails in it arrives as any kind of error.
        raise RolloutError(f"the engine failed to {what}: {error}") from error
