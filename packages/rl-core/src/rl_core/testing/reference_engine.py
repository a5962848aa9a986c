"""The reference engine: a request queue over a sharded model, one token per request and turn."""

import asyncio
from collections.abc import Callable, Sequence

import torch

from rl_core.errors import LifecycleError, RolloutError, TransferTimeoutError
from rl_core.interfaces import PauseMode
from rl_core.testing.reference_kv import KVRows
from rl_core.testing.reference_model import MAX_TOKENS, RankModel, logits
from rl_core.testing.reference_request import QueuedRequest
from rl_core.testing.reference_sampling import sample
from rl_core.testing.reference_weights import EOS
from rl_core.trajectory import Completion, FinishReason, GenerateRequest
from rl_core.versions import PolicyVersion


def _ignore(completion: Completion) -> None:
    """Tell nobody."""


class ReferenceEngine:
    """Queues requests and generates; lives on one event loop."""

    def __init__(self, ranks: Sequence[RankModel], kv: KVRows) -> None:
        self.ranks = ranks
        self.kv = kv
        self.version: PolicyVersion | None = None
        self.tokens_made = 0
        self._queue: list[QueuedRequest] = []
        self._paused: PauseMode | None = None
        self._draining: list[QueuedRequest] = []
        self._unseeded = torch.Generator().manual_seed(0)
        self._changed = asyncio.Condition()

    @property
    def paused(self) -> bool:
        """Whether nothing new is scheduled."""
        return self._paused is not None

    def queue(self, request: GenerateRequest) -> "asyncio.Future[Completion]":
        """Queue one request at once; RolloutError if it cannot be completed."""
        if not 0 < len(request.prompt_ids) < MAX_TOKENS:
            raise RolloutError(f"prompt of {len(request.prompt_ids)} tokens: 1 to {MAX_TOKENS - 1}")
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._queue.append(QueuedRequest(request, done, self._generator(request.sampling.seed)))
        return done

    async def generate(
        self, requests: Sequence[GenerateRequest], ended: Callable[[Completion], None] = _ignore
    ) -> list[Completion]:
        """Complete all requests, in order; `ended` is told of each as soon as it has ended."""

        async def told(answer: "asyncio.Future[Completion]") -> Completion:
            completion = await answer
            ended(completion)
            return completion

        # All are queued before anything else runs: none can slip in behind an abort.
        answers = [self.queue(request) for request in requests]
        await self._wake()
        return list(await asyncio.gather(*map(told, answers)))

    async def run(self) -> None:
        """Generate for ever: one token for each request that has KV memory, then yield."""
        while True:
            async with self._changed:
                await self._changed.wait_for(self._may_step)
            for queued in list(self._queue):
                self._step(queued)
                await asyncio.sleep(0)
            await self._wake()

    async def pause(self, mode: PauseMode, limit_s: float) -> None:
        """Stop scheduling; one that fails holds nothing.

        Errors: TransferTimeoutError if requests do not end in time (`wait`); LifecycleError if they
        cannot, or if another `pause` or a `resume` came first.
        """
        if mode is PauseMode.WAIT:
            self._check_none_kept()
        before = self._paused
        self._draining = list(self._queue) if mode is PauseMode.WAIT else []
        self._paused = mode
        if mode is PauseMode.ABORT:
            self.abort()
        try:
            await self._drained(mode, limit_s)
        except TransferTimeoutError:
            self._paused = before
            await self._wake()
            raise

    async def resume(self) -> None:
        """Go on scheduling."""
        self._paused = None
        await self._wake()

    async def serve(self, version: PolicyVersion) -> None:
        """Sample with `version` from here on, from an empty KV cache.

        Requests that were paused in place keep their part of it.
        """
        in_place = self._paused is PauseMode.IN_PLACE
        self.kv.flush([item.row for item in self._queue if in_place and item.row is not None])
        self.version = version
        await self._wake()

    async def quieten(self, mode: PauseMode, limit_s: float) -> None:
        """`close` for an update; unless paused, requests in flight end or stay as `mode` says."""
        if self.paused or mode is PauseMode.ABORT:
            self.close()
            return
        if mode is PauseMode.WAIT:
            try:
                await self.pause(mode, limit_s)
            finally:
                self._paused = None
        self.version = None

    def close(self) -> None:
        """Schedule nothing until a version is set; unless paused, end what is in flight."""
        self.version = None
        if not self.paused:
            self.abort()

    def abort(self) -> None:
        """End every request in flight with what it has."""
        for queued in list(self._queue):
            self._end(queued, "abort")

    def label(self, queued: QueuedRequest) -> PolicyVersion:
        """The version that samples the present token of `queued`."""
        if self.version is None:
            raise RolloutError(f"{queued.request.request_id}: no version is served")
        return self.version

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _held(self, queued: QueuedRequest) -> bool:
        """Whether this request may not be scheduled now: a pause, or no version to serve."""
        if self.version is None:
            return True
        return self._paused is not None and queued not in self._draining

    def _may_step(self) -> bool:
        return self.kv.allocated and any(not self._held(queued) for queued in self._queue)

    def _check_none_kept(self) -> None:
        kept = self._paused is not None and self._paused.keeps
        if kept or (self.version is None and self._queue):
            msg = "cannot wait for requests in flight: they are kept until continue_ or a commit"
            raise LifecycleError(msg)

    async def _drained(self, mode: PauseMode, limit_s: float) -> None:
        await self._wake()
        draining = self._draining

        def over() -> bool:
            return self._paused is not mode or not set(draining) & set(self._queue)

        try:
            async with asyncio.timeout(limit_s), self._changed:
                await self._changed.wait_for(over)
        except TimeoutError as error:
            raise TransferTimeoutError(f"requests in flight for over {limit_s} s") from error
        if self._paused is not mode:
            raise LifecycleError(f"the pause ({mode}) was overtaken by another one or continue_")

    def _generator(self, seed: int | None) -> torch.Generator:
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._unseeded))
        return torch.Generator().manual_seed(seed)

    def _step(self, queued: QueuedRequest) -> None:
        """Sample one token of one request, if it may run and has KV memory."""
        if queued.done.done() or self._held(queued):
            return
        if queued.row is None:
            queued.row = self.kv.take(queued.sequence)
        if queued.row is None:
            return
        try:
            self._extend(queued, self._forward(queued.row, queued.sequence))
        except RolloutError as error:
            queued.fail(error)
            self._end(queued, "abort")

    def _extend(self, queued: QueuedRequest, scores: torch.Tensor) -> None:
        sampling = queued.request.sampling
        token, log_prob = sample(scores, sampling, queued.generator)
        queued.versions.append(self.label(queued))
        queued.tokens.append(token)
        self.tokens_made += 1
        queued.log_probs.append(log_prob)
        if token == EOS and not sampling.ignore_eos:
            self._end(queued, "stop")
        elif len(queued.tokens) >= sampling.max_tokens or len(queued.sequence) >= MAX_TOKENS:
            self._end(queued, "length")

    def _forward(self, row: int, sequence: list[int]) -> torch.Tensor:
        """Logits after the last token, computing whatever is not in the KV row yet."""
        scores = torch.empty(0)
        for position in range(self.kv.known(row), len(sequence)):
            token = sequence[position]
            scores = logits(self.ranks, token, position, self.kv.memory(row, token))
        return scores

    def _end(self, queued: QueuedRequest, reason: FinishReason) -> None:
        self._queue.remove(queued)
        if queued.row is not None:
            self.kv.give_back(queued.row)
        queued.finish(reason)
