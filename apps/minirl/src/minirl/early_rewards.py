"""Rewards of each prompt's samples as soon as they are there, while the engine makes others."""

import queue
import threading
import time
from collections.abc import Callable, Sequence

from minirl.sampling import Question, Sample
from rl_core.trajectory import Completion

_END_S = 5.0
"""Seconds that the thread has to end after its call was cut short."""

Score = Callable[[Sequence[Sample], int], None]
"""Scores samples of which the first has this position in the batch."""


class EarlyRewards:
    """Scores the groups of one batch in a thread of its own, in the order of their ends.

    A context manager, used by the thread that generates. If its block fails, the reward function
    under way is cut short, so that nobody waits for it.
    """

    def __init__(
        self,
        question: Question,
        decode: Callable[[Sequence[Sequence[int]]], list[str]],
        score: Score,
        cut_short: Callable[[], None],
    ) -> None:
        """Nothing is there to be scored yet.

        Args:
            question: what was asked.
            decode: texts of completions; called in the thread.
            score: called in the thread with the samples of one group at a time.
            cut_short: called from outside the thread: what `score` does fails soon.
        """
        self._question = question
        self._decode = decode
        self._score = score
        self._cut_short = cut_short
        self._arrived: dict[str, Completion] = {}
        self._missing = [question.copies] * len(question.prompts)
        self._groups: list[list[Sample]] = [[] for _ in question.prompts]
        self._ready: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._calls: list[tuple[float, float]] = []
        self._generated = float("inf")
        self._thread = threading.Thread(target=self._work, name="early-rewards", daemon=True)

    def __enter__(self) -> "EarlyRewards":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ready.put(None)
        if kind is not None and self._thread.is_alive():
            self._cut_short()
            self._thread.join(_END_S)

    def add(self, completions: Sequence[Completion]) -> None:
        """Take completions of the question, in any order; the error of a group, if one failed."""
        if self._error is not None:
            raise self._error
        for completion in completions:
            self._arrived[completion.request_id] = completion
            group = self._question.group_of(completion.request_id)
            self._missing[group] -= 1
            if not self._missing[group]:
                self._ready.put(group)

    def wait(self) -> list[Sample]:
        """All samples in order, scored; to be called once, when all were added.

        Errors: that of a group.
        """
        self._generated = time.perf_counter()
        self._ready.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return [sample for group in self._groups for sample in group]

    @property
    def seconds_beside(self) -> float:
        """How long reward functions worked before `wait` was called."""
        return sum(max(0.0, min(end, self._generated) - begin) for begin, end in self._calls)

    def _work(self) -> None:
        try:
            while (group := self._ready.get()) is not None:
                self._score_group(group)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that generates
            self._error = error

    def _score_group(self, group: int) -> None:
        question = self._question
        requests = question.requests_of(group)
        completions = [self._arrived.pop(request.request_id) for request in requests]
        samples = question.samples(completions, self._decode)
        begin = time.perf_counter()
        try:
            self._score(samples, group * question.copies)
        finally:
            self._calls.append((begin, time.perf_counter()))
        self._groups[group] = samples
