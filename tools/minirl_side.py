"""MiniRL's side of `beside_trl.py`: the program `minirl` with its arguments, and three changes.

Each step waits for its order on standard input, tells on standard output what it was, and is
generated to its full length: requests ignore the end of the text.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from turns import Turns

from minirl import sampling, task_runner
from minirl.main import run
from minirl.timing import StepTimer
from minirl.trainer import Trainer
from rl_core.trajectory import SamplingParams
from rl_core.versions import PolicyVersion

_sampling_params = sampling.sampling_params


def to_the_end(*arguments: Any) -> SamplingParams:
    """The configured sampling, which no token ends."""
    return msgspec.structs.replace(_sampling_params(*arguments), ignore_eos=True)


class TrainerOnCommand(Trainer):
    """The app's own trainer; what it does in a step is untouched."""

    turns: Turns

    def fit(self) -> None:
        """Tell that everything has started, and train."""
        self.turns.say()
        super().fit()

    def _step(self, step: int) -> None:
        self.turns.wait()
        super()._step(step)
        self.turns.say(**self._told)

    def _report(
        self,
        step: int,
        served: PolicyVersion,
        samples: Sequence[sampling.Sample],
        numbers: dict[str, float],
        timer: StepTimer,
    ) -> None:
        super()._report(step, served, samples, numbers, timer)
        self._told = {**_tokens(samples), "phases": _phases(timer.metrics())}


def _tokens(samples: Sequence[sampling.Sample]) -> dict[str, int]:
    return {
        "prompt_tokens": sum(len(sample.prompt.prompt_ids) for sample in samples),
        "new_tokens": sum(len(sample.completion.token_ids) for sample in samples),
    }


def _phases(metrics: dict[str, float]) -> dict[str, float]:
    phases = {name.removeprefix("timing_s/"): seconds for name, seconds in metrics.items()}
    return {name: seconds for name, seconds in phases.items() if seconds and name != "step"}


if __name__ == "__main__":
    TrainerOnCommand.turns = Turns()
    sampling.sampling_params = to_the_end
    task_runner.Trainer = TrainerOnCommand
    run()
