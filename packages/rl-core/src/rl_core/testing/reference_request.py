"""A request in the reference engine's queue."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rl_core.trajectory import Completion, FinishReason, GenerateRequest, VersionSpan
from rl_core.versions import PolicyVersion

if TYPE_CHECKING:
    import asyncio


@dataclass(eq=False)
class QueuedRequest:
    """One request, and what was sampled for it so far.

    Attributes:
        request: what was asked for.
        done: where the answer goes.
        generator: its own randomness.
        tokens: sampled tokens.
        log_probs: their log-probabilities.
        versions: the version that sampled each of them.
        row: its row of KV memory; None while it waits for one.
    """

    request: GenerateRequest
    done: "asyncio.Future[Completion]"
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    row: int | None = None

    @property
    def sequence(self) -> list[int]:
        """Prompt and completion tokens."""
        return [*self.request.prompt_ids, *self.tokens]

    def finish(self, reason: FinishReason) -> None:
        """Answer with what there is."""
        if not self.done.done():
            name = self.request.request_id
            answer = Completion(name, self.tokens, self.log_probs, reason, self.spans())
            self.done.set_result(answer)

    def fail(self, error: Exception) -> None:
        """Answer with an error."""
        if not self.done.done():
            self.done.set_exception(error)

    def spans(self) -> list[VersionSpan]:
        """Runs of equal versions."""
        spans: list[VersionSpan] = []
        for index, version in enumerate(self.versions):
            start = index
            if spans and spans[-1].version == version:
                start = spans.pop().start
            spans.append(VersionSpan(version, start, index + 1))
        return spans
