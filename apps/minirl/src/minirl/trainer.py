"""The RL loop."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean

import msgspec

from minirl.advantages import estimate_advantages
from minirl.checkpoints import WRITE_TIMEOUT_S
from minirl.config import MiniRLConfig
from minirl.early_rewards import EarlyRewards
from minirl.gae import with_critic
from minirl.group_filter import keep_informative
from minirl.overlong import shape_rewards
from minirl.policy_passes import STEP_TIMEOUT_S, PolicyPasses
from minirl.prompts import Prompt
from minirl.resume import FRESH, Beginning
from minirl.rollout_correction import corrected
from minirl.run_output import RunOutput
from minirl.sampling import Question, Sample, make_requests
from minirl.saved_run import SavedRun
from minirl.step_metrics import collection_metrics, step_metrics
from minirl.system import RLSystem
from minirl.task_data import TaskData
from minirl.timing import StepTimer
from minirl.trajectories import to_trajectory
from rl_core.logs import kv
from rl_core.trajectory import LogProbs, TrainSample
from rl_core.versions import PolicyVersion

_logger = logging.getLogger(__name__)

Progress = Callable[[int, str, float | None], None]


class Evaluation(msgspec.Struct, frozen=True):
    """Held-out samples of one version.

    Attributes:
        step: training steps done before.
        reward: mean reward of the samples that are rewarded.
        accuracy: share of these with the full reward of 1.
        seconds: generating and scoring.
    """

    step: int
    reward: float
    accuracy: float
    seconds: float = 0.0


class Trainer:
    """Generates with the engine, scores, trains the actor and publishes its weights, in a loop."""

    def __init__(
        self,
        config: MiniRLConfig,
        data: TaskData,
        output: RunOutput,
        system: RLSystem,
        beginning: Beginning = FRESH,
    ) -> None:
        done = beginning.state
        self.evaluations = msgspec.convert(done.evaluations, list[Evaluation])
        self.on_progress: Progress = lambda _step, _phase, _reward: None
        self._config = config
        self._data = data
        self._output = output
        self._system = system
        self._version = PolicyVersion(beginning.epoch, 0)
        self._published_step = done.step
        self._samples_seen = done.samples
        self._passes = PolicyPasses(config, system.workers)
        self._saved = SavedRun(config, data, output, system, beginning)

    def fit(self) -> None:
        """The whole run, or the rest of it: `total_training_steps` steps between evaluations."""
        total = self._config.trainer.total_training_steps
        self._version = self._saved.restore()
        for step in range(self._published_step + 1, total + 1):
            self._step(step)
        self._save_checkpoint(total)
        self._evaluate(step=self._published_step)
        self._saved.save_final(self._save_pretrained)
        self.settle(WRITE_TIMEOUT_S)

    def settle(self, timeout_s: float) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        self._saved.settle(timeout_s)

    def _step(self, step: int) -> None:
        timer = StepTimer()
        served = self._version
        self._evaluate_first(timer, step)
        with self._phase(timer, step, "save"):
            self._save_checkpoint(step - 1)
        with self._phase(timer, step, "sync"):
            self._welcome(step)
        samples = self._collect(timer, step)
        numbers = self._learn(timer, step, samples)
        with self._phase(timer, step, "sync"):
            self._publish(step)
        self._report(step, served, samples, numbers, timer)

    def _learn(self, timer: StepTimer, step: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Update the actor once with scored samples; the numbers of all that."""
        trained = [sample for sample in samples if sample.kept]
        with self._phase(timer, step, "advantage"):
            self._estimate_advantages(trained)
            batch = [sample.to_train_sample() for sample in trained]
        with self._phase(timer, step, "sync"):
            self._release(step)
        with self._phase(timer, step, "old_log_prob"):
            before = self._passes.before_update(batch)
            batch, estimates = self._with_estimates(batch, trained, before)
        with self._phase(timer, step, "ref"):
            batch = self._passes.with_reference(batch)
        with self._phase(timer, step, "update_actor"):
            update, old = self._passes.update(batch, before)
        return {
            **step_metrics(samples, trained, old, update),
            **collection_metrics(samples, self._config),
            **estimates,
        }

    # ------------------------------------------------------------------ phases

    def _collect(self, timer: StepTimer, step: int) -> list[Sample]:
        """Scored samples of a step.

        Dynamic sampling asks further prompts until there are enough groups to train on; the others'
        samples are not `kept`.
        """
        wanted, dynamic = self._config.data.train_batch_size, self._config.algorithm.filter_groups
        samples: list[Sample] = []
        for batch in range(dynamic.max_num_gen_batches if dynamic.enable else 1):
            label = f"s{step}.b{batch}" if batch else f"s{step}"
            samples += self._scored(timer, step, label, batch * wanted)
            if dynamic.enable and keep_informative(samples, wanted) == wanted:
                break
        self._shape_rewards(samples)
        return samples

    def _shape_rewards(self, samples: Sequence[Sample]) -> None:
        longest = self._config.rollout.max_completion_length
        shape_rewards(samples, longest, self._config.reward.overlong_buffer)

    def _with_estimates(
        self,
        batch: Sequence[TrainSample],
        samples: Sequence[Sample],
        old: Sequence[LogProbs] | None,
    ) -> tuple[list[TrainSample], dict[str, float]]:
        """The batch with what follows from the policy before the update, and its metrics.

        Nothing does where that is None.
        """
        if old is None:
            return list(batch), {}
        algorithm = self._config.algorithm
        weighed, weights = corrected(batch, samples, old, algorithm.rollout_correction)
        valued, critic = with_critic(weighed, samples, old, algorithm)
        return valued, {**weights, **critic}

    def _scored(self, timer: StepTimer, step: int, label: str, first_group: int) -> list[Sample]:
        """Samples of the next prompts with their rewards, which may come beside generation."""
        copies = self._config.data.num_generations
        question = self._question(self._data.loader.next_batch(), copies, label, first_group)
        if self._config.reward.per_group:
            return self._scored_by_group(timer, step, question)
        with self._phase(timer, step, "generate"):
            samples = self._complete(question)
        with self._phase(timer, step, "reward"):
            self._score(samples)
        return samples

    def _scored_by_group(self, timer: StepTimer, step: int, question: Question) -> list[Sample]:
        data = self._data
        with EarlyRewards(question, data.decode, self._score, data.scorer.cut_short) as early:
            with self._phase(timer, step, "generate"):
                self._system.rollout.generate(question.requests, early.add)
            with self._phase(timer, step, "reward"):
                samples = early.wait()
        timer.beside("reward_beside_generate", early.seconds_beside)
        return samples

    def _question(
        self, prompts: Sequence[Prompt], copies: int, label: str, first_group: int = 0
    ) -> Question:
        rollout, seed = self._config.rollout, self._config.trainer.seed
        return Question(prompts, make_requests(prompts, copies, rollout, label, seed), first_group)

    def _complete(self, question: Question) -> list[Sample]:
        completions = self._system.rollout.generate(question.requests)
        return question.samples(completions, self._data.decode)

    def _score(self, samples: Sequence[Sample], first: int = 0) -> None:
        """Give them their rewards; errors count from `first`."""
        scores = self._data.scorer.score(
            [sample.prompt for sample in samples],
            [sample.text for sample in samples],
            [sample.completion.token_ids for sample in samples],
            first,
        )
        for sample, score in zip(samples, scores, strict=True):
            sample.raw_reward, sample.rewards = score.total, score.parts

    def _estimate_advantages(self, samples: Sequence[Sample]) -> None:
        lengths = [len(sample.completion.token_ids) for sample in samples]
        rewards = [sample.reward for sample in samples]
        groups = [sample.group for sample in samples]
        values = estimate_advantages(self._config.algorithm, rewards, groups, lengths)
        for sample, value in zip(samples, values, strict=True):
            sample.advantage = value

    def _is_sync_step(self, step: int) -> bool:
        trainer = self._config.trainer
        return step % trainer.sync_freq == 0 or step == trainer.total_training_steps

    def _welcome(self, step: int) -> None:
        """Give late replicas the version served, if the actor has not been trained since."""
        if self._published_step == step - 1:
            self._system.weight_sync.catch_up(self._version)

    def _release(self, step: int) -> None:
        """Free the engines' memory for training; not if they have to serve on without a sync."""
        if self._is_sync_step(step):
            self._system.weight_sync.release()

    def _publish(self, step: int) -> None:
        if not self._is_sync_step(step):
            return
        version = self._system.weight_sync.version_of(self._version.epoch, step)
        record = self._system.weight_sync.sync(version, "trained")
        if record.error is None:  # else the version before was put back, and is served on
            self._version, self._published_step = version, step

    def _evaluate_first(self, timer: StepTimer, step: int) -> None:
        """What the policy can do before it is trained; part of the first step's time."""
        if not self.evaluations:
            with self._phase(timer, step, "eval"):
                self._evaluate(step - 1)

    def _evaluate(self, step: int) -> None:
        """Complete the held-out prompts, with the same seeds every time."""
        prompts = self._data.held_out
        if not prompts:
            return
        start = time.perf_counter()
        samples = self._complete(self._question(prompts, 1, "eval"))
        self._score(samples)
        # None is no reward, here as in training.
        rewards = [sample.raw_reward for sample in samples if sample.raw_reward is not None]
        reward = fmean(rewards) if rewards else 0.0
        accuracy = fmean(reward >= 1 for reward in rewards) if rewards else 0.0
        found = Evaluation(step, reward, accuracy, time.perf_counter() - start)
        self.evaluations.append(found)
        numbers = {"reward": reward, "accuracy": accuracy, "seconds": found.seconds}
        self._output.report_evaluation(step, numbers)
        _logger.info("Evaluation: %s", kv(step=step, samples=len(rewards), **numbers))

    # ------------------------------------------------------------------ files

    def _save_checkpoint(self, step: int) -> None:
        self._saved.save(step, self._samples_seen, self.evaluations)

    def _save_pretrained(self, path: Path) -> None:
        self._system.workers.call("save_pretrained", str(path), timeout_s=STEP_TIMEOUT_S)

    def _phase(self, timer: StepTimer, step: int, name: str) -> AbstractContextManager[None]:
        self.on_progress(step, name, None)
        return timer.phase(name)

    def _report(
        self,
        step: int,
        served: PolicyVersion,
        samples: Sequence[Sample],
        numbers: dict[str, float],
        timer: StepTimer,
    ) -> None:
        self._record(served, samples)
        tokens = sum(len(s.prompt.prompt_ids) + len(s.completion.token_ids) for s in samples)
        timing = timer.metrics()
        speed = tokens / timing["timing_s/step"]
        metrics = {**numbers, "tokens_per_second": speed, **timing}
        self._output.write_metrics(step, {"policy_version": str(served), **metrics})
        self.on_progress(step, "done", numbers["reward/mean"])
        _logger.info(
            "[Step %d/%d] %s", step, self._config.trainer.total_training_steps, _line(metrics)
        )

    def _record(self, served: PolicyVersion, samples: Sequence[Sample]) -> None:
        digest = self._system.weight_sync.digest_of(served)
        first = self._samples_seen
        copies = self._config.data.num_generations
        self._output.write_trajectories(
            to_trajectory(sample, first + offset, (first + offset) // copies, digest)
            for offset, sample in enumerate(samples)
        )
        self._samples_seen += len(samples)


_SHOWN = {
    "reward": "reward/mean",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "logprob_diff": "rollout_train_logprob_diff/mean",
    "generate_s": "timing_s/generate",
    "update_s": "timing_s/update_actor",
    "sync_s": "timing_s/sync",
    "step_s": "timing_s/step",
}
"""What the log says of a step, by the names it uses."""


def _line(metrics: dict[str, float]) -> str:
    return kv(**{name: metrics[key] for name, key in _SHOWN.items() if key in metrics})
