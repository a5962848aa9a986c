"""The loop without one of its halves (`debug.rollout_only`, `debug.train_only`)."""

from collections.abc import Iterator, Sequence

from minirl.config import MiniRLConfig
from minirl.recorded_samples import RecordedSamples
from minirl.run_output import RunOutput
from minirl.sampling import Sample
from minirl.step_metrics import collection_metrics, sample_metrics
from minirl.system import RLSystem
from minirl.task_data import TaskData
from minirl.timing import StepTimer
from minirl.trainer import Trainer
from rl_core.versions import PolicyVersion


class RolloutOnlyTrainer(Trainer):
    """Generates and scores; the policy stays as it is in the beginning."""

    def fit(self) -> None:
        """Publish the weights once, then generate `total_training_steps` batches."""
        self._system.weight_sync.sync(self._version, "initial")
        for step in range(1, self._config.trainer.total_training_steps + 1):
            self._step(step)

    def _step(self, step: int) -> None:
        timer = StepTimer()
        self._evaluate_first(timer, step)
        with self._phase(timer, step, "sync"):
            self._system.weight_sync.catch_up(self._version)
        samples = self._collect(timer, step)
        numbers = {**sample_metrics(samples), **collection_metrics(samples, self._config)}
        self._report(step, self._version, samples, numbers, timer)


class TrainOnlyTrainer(Trainer):
    """Trains on recorded samples; there is no rollout engine, and nothing is published.

    Advantages are estimated again from the recorded rewards, old log-probabilities are computed
    with the policy as it is now, so that a first step repeats what the recorded run did.
    """

    def __init__(
        self,
        config: MiniRLConfig,
        data: TaskData,
        output: RunOutput,
        system: RLSystem,
        recorded: RecordedSamples,
    ) -> None:
        super().__init__(config, data, output, system)
        self._batches: Iterator[list[Sample]] = recorded.batches()

    def fit(self) -> None:
        """Train for `total_training_steps` steps and save the model."""
        for step in range(1, self._config.trainer.total_training_steps + 1):
            self._step(step)
        self._saved.save_final(self._save_pretrained)

    def _step(self, step: int) -> None:
        timer = StepTimer()
        samples = next(self._batches)
        spans = samples[0].completion.version_spans
        served = spans[0].version if spans else self._version
        self._report(step, served, samples, self._learn(timer, step, samples), timer)

    def _release(self, step: int) -> None:
        """There is no engine that holds memory."""

    def _save_checkpoint(self, step: int) -> None:
        """Half a loop is not resumed."""

    def _record(self, served: PolicyVersion, samples: Sequence[Sample]) -> None:
        """They are recorded already."""
