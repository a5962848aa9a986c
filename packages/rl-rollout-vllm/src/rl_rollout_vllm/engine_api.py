"""The only place that touches vLLM's engine object; imported in the server process only.

Everything that vLLM raises leaves this module as an error of `rl_core.errors`.
"""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Literal

import msgspec
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rl_core.errors import ConfigError, LifecycleError, RolloutError
from rl_core.interfaces import LiveContent, LiveWeights, PauseMode, Placement
from rl_core.rollout.config import choose_load_path
from rl_core.rollout.engine_arguments import check_known
from rl_core.rollout.live_ranks import together
from rl_core.rollout.protocol import WEIGHTS
from rl_core.trajectory import Completion, GenerateRequest
from rl_core.versions import PolicyVersion
from rl_rollout_vllm import trajectories
from rl_rollout_vllm.admission import Admission
from rl_rollout_vllm.child_processes import child_processes, child_setup
from rl_rollout_vllm.config import VllmConfig
from rl_rollout_vllm.server_args import TRANSFER_BACKEND, engine_args, fields_of
from rl_rollout_vllm.server_env import threads

try:
    from vllm.config.weight_transfer import WeightTransferConfig

    HAS_BRACKET = True
except ImportError:  # an engine older than the weight-transfer API
    HAS_BRACKET = False

logger = logging.getLogger(__name__)

SHUTDOWN_S = 10.0
"""Seconds for the engine's processes to end by themselves."""

DEATH_POLL_S = 0.5
"""Seconds between two looks whether the engine's core is alive, while it owes an answer."""

TOLD_S = 0.05
"""Seconds in which the end of a request that the core has told of is seen here."""

DEATH_NOTICED_S = 1.0
"""Seconds within which vLLM notices that its core has died, after a call to it has failed."""


def load_path(wanted: str) -> Literal["bracketed", "plain"]:
    """The load path to use, for a configured one of `auto`, `bracketed` or `plain`.

    Errors: IncompatibleVersionError if `bracketed` is wanted and this vLLM cannot do it.
    """
    return choose_load_path(wanted, None if HAS_BRACKET else "this vLLM has no weight-transfer API")


class VllmEngine:
    """A running vLLM engine with its processes."""

    last_words = ""

    def __init__(self, llm: AsyncLLM, args: dict[str, Any], config: VllmConfig) -> None:
        self._llm = llm
        self.args = args
        self.workers: list[dict[str, int]] = []
        self.load_path = load_path(config.load_path)
        self._on_cpu = False
        self._admission = Admission(self._hold, self._let_go)
        self._can_hold = hasattr(llm.engine_core, "pause_scheduler_async")

    @classmethod
    async def start(cls, config: VllmConfig, placement: Placement, scratch: str) -> "VllmEngine":
        """Start the engine's processes and wait until they have a model.

        Blocks the event loop while they come up. The caller's process must be single-minded: the
        engine is forked from it on cpu.

        Args:
            config: settings.
            placement: where.
            scratch: directory for the engine's sockets, removed by the last process.

        Errors: ConfigError (a value that vLLM refuses), LifecycleError (it did not come up).
        """
        args = engine_args(config, placement)
        known = fields_of(AsyncEngineArgs)
        check_known(config.engine_kwargs, known)
        args = {key: value for key, value in args.items() if key in known}
        if HAS_BRACKET:
            args["weight_transfer_config"] = WeightTransferConfig(backend=TRANSFER_BACKEND)
        try:
            vllm_config = AsyncEngineArgs(**args).create_engine_config()
        except (ValueError, TypeError, OSError) as error:
            raise ConfigError(f"vLLM refuses the rollout configuration: {error}") from error
        fork = config.start_method == "fork" or (
            config.start_method == "auto" and placement.device == "cpu"
        )
        try:
            with child_processes(fork, child_setup(config, placement, scratch)):
                llm = AsyncLLM.from_vllm_config(
                    vllm_config, disable_log_stats=True, enable_log_requests=False
                )
        except (RuntimeError, ValueError, OSError) as error:
            raise LifecycleError(f"vLLM did not start: {error}") from error
        engine = cls(llm, args, config)
        try:
            await engine._attach(config, placement, scratch)
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    async def _attach(self, config: VllmConfig, placement: Placement, scratch: str) -> None:
        self._on_cpu = placement.device == "cpu"
        if self._on_cpu:
            await self.call("rl_set_threads", threads(config, placement.tp_size))
        self.workers = await self.call("rl_attach", os.getpid(), scratch)

    # -- requests

    async def generate(
        self, request: GenerateRequest, committed: PolicyVersion | None
    ) -> Completion:
        """Complete one request, admitted while `committed` was served; RolloutError."""
        self._check_prompt(request)
        params = SamplingParams(
            output_kind=RequestOutputKind.FINAL_ONLY, **trajectories.sampling_arguments(request)
        )
        # Named so, it is taken as it is; else a thread looks at it, and order is lost.
        prompt = {"type": "token", "prompt_token_ids": request.prompt_ids}
        try:
            async with self._admission.entering():
                queue = await self._llm.add_request(request.request_id, prompt, params)
            final = await self._final_output(queue)
        except RolloutError:
            raise
        except EngineDeadError as error:
            raise RolloutError(f"the engine died: {error}") from error
        except Exception as error:
            # Edge of the engine: what fails in its processes arrives as a bare Exception.
            raise RolloutError(f"request {request.request_id} failed: {error}") from error
        return trajectories.completion_of(request.request_id, final.outputs[0], committed)

    async def _final_output(self, queue: Any) -> Any:
        try:
            return await queue.get()
        except asyncio.CancelledError:
            await self._llm.abort(queue.request_id, internal=True)
            raise

    async def _hold(self) -> None:
        """Let requests queue. An engine that is too old for it begins with the first one."""
        if self._can_hold:
            pause = "engine_core.pause_scheduler_async"
            await self._ask("hold its scheduler", pause, mode="keep", clear_cache=False)

    async def _let_go(self) -> None:
        if self._can_hold:
            await self._ask("go on", "engine_core.resume_scheduler_async")

    def _check_prompt(self, request: GenerateRequest) -> None:
        # Without a tokenizer vLLM lets such a prompt through, and its core dies of it.
        size = self._llm.model_config.get_vocab_size()
        if not request.prompt_ids or not all(0 <= token < size for token in request.prompt_ids):
            what = f"its prompt must be one or more token ids below {size}"
            raise RolloutError(f"request {request.request_id}: {what}")

    def tokens_underway(self) -> int:
        """Tokens of unfinished requests, which the core tells of after every step."""
        states = self._llm.output_processor.request_states.values()
        return sum(state.detokenizer.num_output_tokens() for state in states if state.detokenizer)

    async def pause(self, mode: PauseMode) -> None:
        """Stop scheduling; the KV cache is dropped unless requests are kept.

        Errors: RolloutError for `in_place`. vLLM drops no cached prefix while a request holds its
        KV: others would be answered from KV of the old version.
        """
        if mode is PauseMode.IN_PLACE:
            msg = "vLLM does not pause in_place: its prefix cache would outlive an update; use keep"
            raise RolloutError(msg)
        keep = mode is PauseMode.KEEP
        await self._admission.close()
        await self._ask("pause", "pause_generation", mode=mode.value, clear_cache=not keep)
        while mode is PauseMode.WAIT and await self._left_behind():
            await self._ask("go on", "resume_generation")
            await self._ask("pause", "pause_generation", mode=mode.value, clear_cache=True)

    async def _left_behind(self) -> bool:
        """Whether requests have begun and not ended, though vLLM has waited for their end.

        It (seen in 0.32) waits for those that hold KV blocks, not for those that it has put back
        for lack of them. When it goes on they come first, and then have blocks again.
        """
        if self.tokens_underway():
            await asyncio.sleep(TOLD_S)
        return self.tokens_underway() > 0

    async def resume(self) -> None:
        """Schedule again."""
        self._admission.reopen()
        await self._ask("resume", "resume_generation")

    async def clear_kv_cache(self) -> None:
        """Drop cached prefixes, also of requests that are kept; they are computed again.

        Errors: RolloutError unless the engine confirms it.
        """
        confirmed = await self._ask("flush", "reset_prefix_cache", reset_running_requests=True)
        if not confirmed:
            raise RolloutError("the engine did not confirm that its KV cache was flushed")

    async def zero_kv_cache(self) -> None:
        """Overwrite the blocks on cpu, where the attention kernel lets a NaN in them come back."""
        if self._on_cpu:
            await self.call("rl_clear_kv_memory")

    async def set_version(self, version: str) -> None:
        """Stamp tokens with `version` from here on."""
        await self._ask("set the version", "update_weight_version", version)

    # -- processes

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of our worker extension on every rank; results in rank order."""
        answers = await self._ask(method, "collective_rpc", "rl_answer", args=(method, args))
        for rank, (good, value) in enumerate(answers):
            if not good:
                raise RolloutError(f"{method!r} failed on rank {rank}: {value}")
        return [value for _, value in answers]

    async def update(self, requests: Sequence[bytes]) -> list[bytes]:
        """Run one weight update on every rank; an encoded `UpdateResult` of each."""
        return await self.call("rl_update", list(requests))

    async def live_digests(self) -> list[dict[str, str]]:
        """Digests of what every rank computes with, by run-time name, in rank order."""
        return await self.call("rl_live_digests")

    async def live_weights(self) -> LiveWeights:
        """The same, with how the engine runs."""
        return together("vllm", await self.call("rl_live_weights"))

    async def live_content(self, tp_rank: int, name: str, start: int) -> LiveContent | None:
        """A piece of a tensor that rank `tp_rank` computes with; None if it has no such tensor."""
        answers = await self.call("rl_live_content", tp_rank, name, start)
        found = answers[tp_rank]
        return None if found is None else msgspec.msgpack.decode(found, type=LiveContent)

    async def release(self, tags: Sequence[str]) -> dict[str, int]:
        """Free memory; bytes over all ranks by tag that could be freed.

        On cpu by our worker extension, on accelerators by vLLM's sleep mode (never run: no such
        hardware was at hand).
        """
        if self._on_cpu:
            ranks = await self.call("rl_release", list(tags))
            freed = {tag: sum(rank[tag] for rank in ranks) for tag in tags}
            return {tag: nbytes for tag, nbytes in freed.items() if nbytes}
        before = sum(await self.call("rl_device_free"))
        if WEIGHTS in tags:
            await self._ask("release memory", "sleep", level=2)
        else:
            await self._ask("release memory", "release_kv_cache_memory")
        freed_bytes = max(0, sum(await self.call("rl_device_free")) - before)
        # The device tells only the sum; it is booked on the first tag.
        return dict.fromkeys(tags, 0) | {tags[0]: freed_bytes}

    async def restore(self, tags: Sequence[str]) -> None:
        """Allocate again what `release` freed."""
        if self._on_cpu:
            await self.call("rl_resume", list(tags))
            return
        await self._ask("wake up", "wake_up", list(tags))

    async def _ask(self, what: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the engine's core answers to a method of vLLM's client.

        vLLM (seen in 0.32) forgets the calls under way when its core dies: they would never end.

        Errors: RolloutError if it fails, dies meanwhile, or this vLLM has no such method.
        """
        with _translated(what):
            task = asyncio.ensure_future(attrgetter(method)(self._llm)(*args, **kwargs))
            try:
                while not task.done():
                    await asyncio.wait({task}, timeout=DEATH_POLL_S)
                    if not (task.done() or self.alive):
                        raise EngineDeadError
                if task.exception() is not None and await self._dying():
                    raise EngineDeadError from task.exception()
                return task.result()
            finally:
                task.cancel()

    async def _dying(self) -> bool:
        """Whether a call failed because the core is on its way out, which vLLM tells a bit later.

        Until then it says of the calls under way that they were cancelled.
        """
        if self.alive:
            await asyncio.sleep(DEATH_NOTICED_S)
        return not self.alive

    @property
    def alive(self) -> bool:
        """Whether the engine's core still answers."""
        return not self._llm.errored

    async def ended(self) -> None:
        """Return once the engine's core has died; vLLM tells only who asks."""
        while self.alive:  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(DEATH_POLL_S)

    @property
    def client(self) -> AsyncLLM:
        """The engine client, for vLLM's own HTTP handlers."""
        return self._llm

    async def shutdown(self) -> None:
        """End the engine's processes."""
        await asyncio.to_thread(self._llm.shutdown, timeout=SHUTDOWN_S)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except EngineDeadError as error:
        raise RolloutError(f"the engine died; cannot {what}: {error}") from error
    except Exception as error:
        # Edge of the engine: what fails in its processes arrives as a bare Exception.
        raise RolloutError(f"the engine failed to {what}: {error}") from error
