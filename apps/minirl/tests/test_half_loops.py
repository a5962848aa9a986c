"""Half of the loop, with parts that answer by rote: what is asked of the other half."""

import json
import time
from types import SimpleNamespace

import pytest

from minirl.config import load_config
from minirl.half_loops import RolloutOnlyTrainer, TrainOnlyTrainer
from minirl.prompts import Prompt
from minirl.recorded_samples import RecordedSamples
from minirl.reward_mix import Score
from minirl.run_output import RunOutput
from rl_core.trajectory import Completion, LogProbs, VersionSpan
from rl_core.versions import PolicyVersion

SMALL = (
    "data.train_batch_size=2",
    "data.num_generations=2",
    "algorithm.ppo_mini_batch_size=4",
    "trainer.total_training_steps=3",
    "trainer.report_to=[]",
)


class Parts:
    """Everything around a trainer, and what was asked of it."""

    world_size = 2

    def __init__(self):
        self.asked, self.updated, self._number = [], [], 0
        self.data = SimpleNamespace(
            held_out=[self._prompt()],
            decode=lambda sequences: [str(sequence) for sequence in sequences],
            loader=SimpleNamespace(next_batch=lambda: [self._prompt(), self._prompt()]),
            scorer=SimpleNamespace(score=self._score),
            model_path=None,
        )

    def _prompt(self):
        self._number += 1
        return Prompt(self._number, [], f"say {self._number}:", [self._number, 2], {})

    def _score(self, prompts, completions, completion_ids, first):
        values = [at / 10 for at in range(len(prompts))]
        return [Score(value, {"a": value, "b": None}) for value in values]

    def engine(self):
        """A system with a rollout half; it has no actor to train."""
        sync = SimpleNamespace(
            sync=lambda version, phase: self.asked.append(f"{phase} {version}"),
            catch_up=lambda version: None,
            digest_of=lambda version: None,
        )
        rollout = SimpleNamespace(generate=self._generate)
        return SimpleNamespace(weight_sync=sync, rollout=rollout, workers=self)

    def _generate(self, requests):
        spans = [VersionSpan(PolicyVersion(1, 0), 0, 2)]
        return [
            Completion(request.request_id, [5, 6], [-1.0, -2.0], "stop", spans)
            for request in requests
        ]

    def actors(self):
        """A system without a rollout half: no weight sync, no engine."""
        return SimpleNamespace(workers=self)

    def call_each(self, method, arguments, *, timeout_s):
        given = [arguments(rank)[0] for rank in range(self.world_size)]
        if method == "update_policy":
            self.updated.append([sample for part in given for sample in part])
            return [{"loss": 0.25, "grad_norm": 0.5}] * 2
        assert method == "compute_log_prob"
        return [[LogProbs([-1.0, -1.0], [0.5, 0.5]) for _ in part] for part in given]

    def call(self, method, *_arguments, timeout_s):
        if method == "tells_update_scores":
            return [False] * self.world_size
        self.asked.append(method)
        return None


def lines(path, name):
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


@pytest.fixture
def recorded(tmp_path):
    """A run that only generated, and its parts."""
    parts, path = Parts(), tmp_path / "recorded"
    path.mkdir()
    config = load_config([*SMALL, "debug.rollout_only=true", "data.eval_size=1"])
    with RunOutput(path, config) as output:
        RolloutOnlyTrainer(config, parts.data, output, parts.engine()).fit()
    return path, parts


def test_generating_asks_nothing_of_the_actor_but_its_weights(recorded):
    path, parts = recorded
    assert parts.asked == ["initial e1.s0"]
    assert parts.updated == []
    metrics = lines(path, "metrics.jsonl")
    assert [line["reward/a/mean"] for line in metrics] == [pytest.approx(0.15)] * 3
    assert all("loss" not in line for line in metrics)
    samples = lines(path, "trajectories.jsonl")
    assert [item["index"] for item in samples] == list(range(12))
    assert {tuple(item["loss_mask"]) for item in samples} == {(0, 0)}
    assert [item["reward"] for item in samples[:4]] == [0.0, 0.1, 0.2, 0.3]


def test_training_takes_the_recorded_samples_and_needs_no_engine(recorded, tmp_path):
    source, _ = recorded
    parts, path = Parts(), tmp_path / "trained"
    path.mkdir()
    config = load_config([*SMALL, f"debug.train_only={source}"])
    samples = RecordedSamples(source, 4, vocab_size=99)
    with RunOutput(path, config) as output:
        TrainOnlyTrainer(config, parts.data, output, parts.actors(), samples).fit()
    assert parts.asked == ["save_pretrained"]
    rows = lines(source, "trajectories.jsonl")
    for step, batch in enumerate(parts.updated):
        prompts = sorted(sample.prompt_ids for sample in batch)
        assert prompts == sorted(row["prompt_ids"] for row in rows[4 * step : 4 * step + 4])
        assert all(sample.loss_mask == [1, 1] for sample in batch)
        # Two samples a group, a tenth apart: half a tenth from their mean, over their deviation.
        signs = sorted(round(sample.advantages[0], 3) for sample in batch)
        assert signs == [-0.707, -0.707, 0.707, 0.707]
    metrics = lines(path, "metrics.jsonl")
    assert [line["loss"] for line in metrics] == [0.25] * 3
    assert metrics[0]["rollout_train_logprob_diff/mean"] == 0.5
    assert metrics[0]["policy_version"] == "e1.s0"
    assert (path / "trajectories.jsonl").read_text() == ""


def test_an_evaluation_leaves_out_what_is_not_rewarded_and_says_its_time(tmp_path):
    parts = Parts()
    parts.data.held_out = [parts._prompt() for _ in range(3)]
    score = parts.data.scorer.score

    def slow(prompts, *rest):
        if len(prompts) != 3:
            return score(prompts, *rest)
        time.sleep(0.05)
        return [Score(value, {}) for value in (1.0, None, 0.5)]

    parts.data.scorer.score = slow
    config = load_config([*SMALL, "debug.rollout_only=true", "data.eval_size=3"])
    with RunOutput(tmp_path, config) as output:
        trainer = RolloutOnlyTrainer(config, parts.data, output, parts.engine())
        trainer.fit()
    [found] = trainer.evaluations
    assert (found.step, found.reward, found.accuracy) == (0, 0.75, 0.5)
    assert found.seconds > 0.05
    first, *others = [line["timing_s/eval"] for line in lines(tmp_path, "metrics.jsonl")]
    assert first == pytest.approx(found.seconds, abs=0.02)
    assert others == [0.0, 0.0]
