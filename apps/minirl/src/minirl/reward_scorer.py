"""Scoring with a function in a process of its own; a failure is narrowed down to its samples."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from minirl.prompts import Prompt
from minirl.reward_messages import Loaded, Raised, Target
from minirl.reward_narrowing import Failure, FaultSearch, Values
from minirl.reward_process import RewardProcess
from rl_core.errors import MiniRLError, TransferError, TransferTimeoutError

_logger = logging.getLogger(__name__)

_EXCERPT = 60
_LOOKING = "%s; looking for the sample at fault, for %.0f s at most"


class RewardError(MiniRLError, RuntimeError):
    """A reward function failed or returned what is no reward.

    Attributes:
        samples: positions in the batch of the samples at fault; several if it could not be
            narrowed down.
    """

    def __init__(self, message: str, samples: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.samples = tuple(samples)

    def __reduce__(self) -> tuple[type, tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.samples)


class FunctionScorer:
    """Calls a reward function in its own process, which is started once.

    Blocking and not thread-safe, but for `cut_short`. After a call that did not return in time the
    process was killed; the next call starts another.
    """

    def __init__(
        self,
        target: Target,
        timeout_s: float,
        log_path: Path | None = None,
        encode_column: Callable[[Any], Any] | None = None,
        columns: Iterable[str] = (),
    ) -> None:
        """Start the process and load the function; ConfigError if that fails.

        Args:
            target: the function.
            timeout_s: longest call.
            log_path: file for what it prints; None is stderr.
            encode_column: applied to each value of a column before it is sent.
            columns: those that are always passed, also if no prompt of a batch has them.
        """
        self._target = target
        self._timeout_s = timeout_s
        self._log_path = log_path
        self._encode_column = encode_column
        self._columns = tuple(columns)
        self._name = f"{Path(target.path or target.module or '').name}:{target.name}"
        self._process: RewardProcess | None = RewardProcess(target, log_path)
        self._is_cut_short = False
        self.signature: Loaded = self._process.signature

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        first: int = 0,
    ) -> list[float | None]:
        """One reward a completion; see `minirl.rewards.Scorer.score`."""
        if not prompts:
            return []
        arguments = self._arguments(prompts, completions, completion_ids)

        def attempt(samples: Sequence[int], limit_s: float) -> tuple[Values | Failure, float]:
            return self._attempt(arguments, samples, limit_s)

        outcome, _ = attempt(range(len(prompts)), self._timeout_s)
        if isinstance(outcome, Failure):
            search = FaultSearch(attempt, self._timeout_s)
            message = f"reward function {self._name} {outcome.text}"
            if outcome.kind == "hung" and len(prompts) > 1:
                _logger.warning(_LOOKING, message, search.longest_s)
            samples, note = search.find(range(len(prompts)), outcome.kind)
            named = _name_samples(samples, prompts, first)
            raise RewardError(f"{message}{named}{note}", [first + at for at in samples])
        return checked(outcome, prompts, self._name, first)

    def cut_short(self) -> None:
        """End the call under way, which raises RewardError, and serve no other. From any thread."""
        self._is_cut_short = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _arguments(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
    ) -> dict[str, list[Any]]:
        chat = prompts[0].is_chat
        arguments: dict[str, list[Any]] = {
            "prompts": [prompt.messages if chat else prompt.text for prompt in prompts],
            "completions": [
                [{"role": "assistant", "content": text}] if chat else text for text in completions
            ],
            "completion_ids": [list(ids) for ids in completion_ids],
        }
        present = (name for prompt in prompts for name in prompt.columns)
        for name in dict.fromkeys((*self._columns, *present)):
            encode = self._encode_column or (lambda value: value)
            arguments[name] = [encode(prompt.columns.get(name)) for prompt in prompts]
        accepted = self.signature
        return {
            name: values
            for name, values in arguments.items()
            if accepted.takes_any or name in accepted.parameters
        }

    def _attempt(
        self, arguments: dict[str, list[Any]], samples: Sequence[int], timeout_s: float
    ) -> tuple[Values | Failure, float]:
        """What came of scoring some of the samples, and the seconds that it took."""
        if self._process is None and not self._is_cut_short:
            self._process = RewardProcess(self._target, self._log_path)
        if self._process is None or self._is_cut_short:
            raise RewardError(f"reward function {self._name} was cut short")
        part = {name: [values[at] for at in samples] for name, values in arguments.items()}
        started = time.monotonic()
        outcome = self._called(self._process, part, timeout_s)
        seconds = time.monotonic() - started
        if not isinstance(outcome, Failure) and len(outcome) != len(samples):
            text = f"returned {len(outcome)} rewards for {len(samples)} samples"
            return Failure("length", text), seconds
        return outcome, seconds

    def _called(
        self, process: RewardProcess, part: dict[str, list[Any]], timeout_s: float
    ) -> Values | Failure:
        try:
            answer = process.call(part, timeout_s)
        except TransferTimeoutError:
            self.close()
            return Failure("hung", f"did not return within {timeout_s:g} s")
        except TransferError:
            self.close()
            return Failure("died", f"ended its process (exit code {process.exit_code})")
        if isinstance(answer, Raised):
            return Failure("raised", f"failed: {answer.error}")
        return answer.values


def checked(
    values: Sequence[float | str | None], prompts: Sequence[Prompt], name: str, first: int = 0
) -> list[float | None]:
    """The rewards if each is a finite number or None, else RewardError naming the samples.

    `first` is the position of the first one in the batch.
    """
    rewards = [float(value) if isinstance(value, int) else value for value in values]
    bad = [
        at
        for at, value in enumerate(rewards)
        if value is not None and (isinstance(value, str) or not math.isfinite(value))
    ]
    if bad:
        named = _name_samples(bad, prompts, first)
        msg = f"reward function {name} returned {rewards[bad[0]]}{named}"
        raise RewardError(msg, [first + at for at in bad])
    return [value for value in rewards if not isinstance(value, str)]


def _name_samples(samples: Sequence[int], prompts: Sequence[Prompt], first: int) -> str:
    of_first = prompts[samples[0]]
    text = of_first.text
    excerpt = text if len(text) <= _EXCERPT else text[:_EXCERPT] + "..."
    prompt = f"prompt {of_first.index}: {excerpt!r}"
    if len(samples) == 1:
        return f" for sample {first + samples[0]} ({prompt})"
    shown = ", ".join(str(first + at) for at in samples[:4])
    more = f" and {len(samples) - 4} more" if len(samples) > 4 else ""
    return f" for samples {shown}{more} (the first has {prompt})"
