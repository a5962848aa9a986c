"""Scoring with a function in a process of its own; a failure is narrowed down to its samples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from minirl.prompts import Prompt
from minirl.reward_messages import Loaded, Raised, Target
from minirl.reward_process import RewardProcess
from rl_core.deadlines import Deadline
from rl_core.errors import MiniRLError, TransferError, TransferTimeoutError

_PROBE_S = 2.0
"""Longest call while looking for the sample at fault."""
_NARROW_S = 15.0
"""Longest time spent on looking for it."""
_EXCERPT = 60


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


@dataclass(frozen=True)
class _Failure:
    kind: Literal["hung", "died", "raised", "length"]
    text: str


Values = list[float | str | None]


class FunctionScorer:
    """Calls a reward function in its own process, which is started once.

    Blocking and not thread-safe. After a call that did not return in time the process was killed;
    the next call starts another.
    """

    def __init__(
        self,
        target: Target,
        timeout_s: float,
        log_path: Path | None = None,
        encode_column: Callable[[Any], Any] | None = None,
    ) -> None:
        """Start the process and load the function; ConfigError if that fails.

        Args:
            target: the function.
            timeout_s: longest call.
            log_path: file for what it prints; None is stderr.
            encode_column: applied to each value of a column before it is sent.
        """
        self._target = target
        self._timeout_s = timeout_s
        self._log_path = log_path
        self._encode_column = encode_column
        self._name = f"{Path(target.path or target.module or '').name}:{target.name}"
        self._process: RewardProcess | None = RewardProcess(target, log_path)
        self.signature: Loaded = self._process.signature

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
    ) -> list[float | None]:
        """One reward a completion; see `minirl.rewards.Scorer.score`."""
        if not prompts:
            return []
        arguments = self._arguments(prompts, completions, completion_ids)
        everything = range(len(prompts))
        outcome = self._attempt(arguments, everything, self._timeout_s)
        if isinstance(outcome, _Failure):
            samples = self._narrow(arguments, everything, outcome)
            msg = f"reward function {self._name} {outcome.text}{_name_samples(samples, prompts)}"
            raise RewardError(msg, samples)
        return checked(outcome, prompts, self._name)

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
        for name in dict.fromkeys(name for prompt in prompts for name in prompt.columns):
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
    ) -> Values | _Failure:
        if self._process is None:
            self._process = RewardProcess(self._target, self._log_path)
        part = {name: [values[at] for at in samples] for name, values in arguments.items()}
        try:
            answer = self._process.call(part, timeout_s)
        except TransferTimeoutError:
            self.close()
            return _Failure("hung", f"did not return within {timeout_s:g} s")
        except TransferError:
            process, self._process = self._process, None
            process.close()
            return _Failure("died", f"ended its process (exit code {process.exit_code})")
        if isinstance(answer, Raised):
            return _Failure("raised", f"failed: {answer.error}")
        if len(answer.values) != len(samples):
            text = f"returned {len(answer.values)} rewards for {len(samples)} samples"
            return _Failure("length", text)
        return answer.values

    def _narrow(
        self, arguments: dict[str, list[Any]], samples: Sequence[int], first: _Failure
    ) -> Sequence[int]:
        """Halve the batch as long as a half fails alike, within a time of its own."""
        deadline = Deadline.after(_NARROW_S)
        probe_s = min(self._timeout_s, _PROBE_S)
        while len(samples) > 1:
            middle = len(samples) // 2
            for half in (samples[:middle], samples[middle:]):
                if deadline.expired:
                    return samples
                outcome = self._attempt(arguments, half, probe_s)
                if isinstance(outcome, _Failure) and outcome.kind == first.kind:
                    samples = half
                    break
            else:
                return samples
        return samples


def checked(
    values: Sequence[float | str | None], prompts: Sequence[Prompt], name: str
) -> list[float | None]:
    """The rewards if each is a finite number or None, else RewardError naming the samples."""
    rewards = [float(value) if isinstance(value, int) else value for value in values]
    bad = [
        at
        for at, value in enumerate(rewards)
        if value is not None and (isinstance(value, str) or not math.isfinite(value))
    ]
    if bad:
        first = rewards[bad[0]]
        msg = f"reward function {name} returned {first}{_name_samples(bad, prompts)}"
        raise RewardError(msg, bad)
    return [value for value in rewards if not isinstance(value, str)]


def _name_samples(samples: Sequence[int], prompts: Sequence[Prompt]) -> str:
    first = prompts[samples[0]]
    excerpt = first.text if len(first.text) <= _EXCERPT else first.text[:_EXCERPT] + "..."
    prompt = f"prompt {first.index}: {excerpt!r}"
    if len(samples) == 1:
        return f" for sample {samples[0]} ({prompt})"
    shown = ", ".join(str(at) for at in samples[:4])
    more = f" and {len(samples) - 4} more" if len(samples) > 4 else ""
    return f" for samples {shown}{more} (the first has {prompt})"
