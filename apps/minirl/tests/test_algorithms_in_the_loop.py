"""The loop with parts that answer by rote: what reaches the train engine, and what is written."""

import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import msgspec
import pytest

from minirl.config import load_config
from minirl.prompts import Prompt
from minirl.run_output import RunOutput
from minirl.trainer import Trainer
from rl_core.trajectory import Completion, LogProbs

LENGTH = 3
"""Tokens of every response; the limit is one more."""

SMALL = (
    "data.train_batch_size=2",
    "data.num_generations=2",
    "algorithm.ppo_mini_batch_size=4",
    "rollout.max_completion_length=4",
    "trainer.total_training_steps=1",
    "trainer.report_to=[]",
    "data.eval_size=0",
)


class Loop:
    """A trainer whose rewards are given, and what it made of them."""

    def __init__(self, path, rewards, *overrides):
        config = load_config([*SMALL, *overrides])
        self.updated, self.requests, self._rewards = [], [], iter(rewards)
        self.called, self._dealt = [], []
        prompts = iter(range(99))
        system = MagicMock()
        system.weight_sync.digest_of.return_value = None
        system.rollout.generate = self._generate
        system.workers = SimpleNamespace(world_size=2, call_each=self._call_each, call=self._call)
        data = MagicMock(held_out=[], decode=lambda sequences: ["x"] * len(sequences))
        data.loader.next_batch = lambda: [self._prompt(next(prompts)) for _ in range(2)]
        with RunOutput(path, config) as output:
            self.trainer = Trainer(config, data, output, system)
            self.trainer._score = self._score
            self.trainer._step(1)
        lines = (path / "trajectories.jsonl").read_text().splitlines()
        self.trajectories = [json.loads(line) for line in lines]
        self.metrics = json.loads((path / "metrics.jsonl").read_text())

    def _prompt(self, number):
        ids = [number + 1]
        return msgspec.structs.replace(PROMPT, index=number, prompt_ids=ids)

    def _generate(self, requests):
        self.requests += [request.request_id for request in requests]
        return [
            Completion(request.request_id, [5] * LENGTH, [-2.0] * LENGTH, "stop", [])
            for request in requests
        ]

    def _score(self, samples):
        for sample in samples:
            sample.raw_reward = next(self._rewards)

    def _call_each(self, method, arguments, *, timeout_s):
        given = self._dealt = [arguments(rank)[0] for rank in range(2)]
        self.called.append(method)
        if method == "update_policy":
            self.updated += [sample for part in given for sample in part]
            return [{"loss": 0.0, "grad_norm": 0.0}] * 2
        assert (method, timeout_s) == ("compute_log_prob", 7200.0)
        return self._scores()

    def _call(self, method, *_, timeout_s):
        if method == "tells_update_scores":
            return [True, True]
        self.called.append(method)
        return self._scores() if method == "update_scores" else None

    def _scores(self):
        scores = LogProbs([-1.0] * LENGTH, [0.5] * LENGTH, [0.25] * LENGTH)
        return [[scores for _ in part] for part in self._dealt]


PROMPT = Prompt(index=0, text="say 1:", messages=[], is_chat=False, prompt_ids=[1], columns={})


def advantages(loop):
    """Of the first token, by prompt, in the order of the prompts."""
    found = {}
    for sample in sorted(loop.updated, key=lambda item: item.prompt_ids):
        found.setdefault(sample.prompt_ids[0], []).append(sample.advantages[0])
    return found


DYNAMIC = "algorithm.filter_groups.enable=true"


def test_groups_without_a_difference_are_replaced_until_the_batch_is_full(tmp_path):
    # Prompts 1 to 6 in batches of two; 2, 4 and 5 can be learned from, and two are enough.
    rewards = [1, 1, 0, 2, 0, 0, 0, 4]
    loop = Loop(tmp_path, rewards, "config=dr_grpo", DYNAMIC)
    assert advantages(loop) == {2: [-1.0, 1.0], 4: [-2.0, 2.0]}
    assert loop.metrics["filter_groups/kept"] == 2
    assert loop.metrics["filter_groups/generated"] == 4
    assert len(set(loop.requests)) == 8
    assert [item["group_index"] for item in loop.trajectories] == [0, 0, 1, 1, 2, 2, 3, 3]
    masks = [item["loss_mask"][0] for item in loop.trajectories]
    assert masks == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [item["reward"] for item in loop.trajectories] == rewards
    assert loop.metrics["reward/mean"] == 1.0


def test_nobody_asks_for_ever(tmp_path):
    limit = "algorithm.filter_groups.max_num_gen_batches=3"
    loop = Loop(tmp_path, [1] * 12, "config=dr_grpo", DYNAMIC, limit)
    assert len(loop.requests) == 12
    assert loop.updated == []
    assert loop.metrics["filter_groups/kept"] == 0


def test_without_dynamic_sampling_every_group_is_trained_on(tmp_path):
    loop = Loop(tmp_path, [1, 1, 0, 2], "config=dr_grpo")
    assert advantages(loop) == {1: [0.0, 0.0], 2: [-1.0, 1.0]}
    assert not [name for name in loop.metrics if name.startswith(("filter_groups", "rollout_is"))]


APART = ["compute_log_prob", "update_policy"]


@pytest.mark.parametrize(
    ("given", "called"),
    [
        ("algorithm.ppo_mini_batch_size=4", ["update_policy", "update_scores"]),
        ("algorithm.ppo_mini_batch_size=2", APART),
        ("algorithm.ppo_epochs=2", APART),
        ("algorithm.recompute_old_log_probs=true", APART),
        ("algorithm.rollout_correction.rollout_is=token", APART),
        ("algorithm.adv_estimator=ppo", APART),
    ],
)
def test_old_log_probs_are_computed_where_the_update_does_not_tell_them(tmp_path, given, called):
    loop = Loop(tmp_path, [1, 1, 0, 2], given)
    assert loop.called == called
    assert loop.metrics["old_log_probs/recomputed"] == float(called is APART)
    assert {sample.old_log_probs is None for sample in loop.updated} == {called is not APART}
    assert loop.metrics["rollout_train_logprob_diff/mean"] == 1.0
    assert loop.metrics["entropy"] == 0.5


def test_a_sample_out_of_the_loss_is_in_no_metric_of_the_policy(tmp_path):
    """Also where a pass of its own has looked at it."""
    unlike = LogProbs([-9.0] * LENGTH, [7.5] * LENGTH, [0.0] * LENGTH)

    class Differing(Loop):
        def _scores(self):
            (alike, *_), *_ = super()._scores()
            return [
                [alike if any(sample.loss_mask) else unlike for sample in part]
                for part in self._dealt
            ]

    loop = Differing(tmp_path, [1, None, 0, 2], "algorithm.recompute_old_log_probs=true")
    assert loop.metrics["entropy"] == 0.5
    assert loop.metrics["rollout_train_logprob_diff/max"] == 1.0


def test_what_is_trained_on_is_the_reward_less_what_its_length_costs(tmp_path):
    # 3 of 4 tokens with a buffer of 2: half of the penalty.
    buffer = "reward.overlong_buffer={enable: true, len: 2, penalty_factor: 0.5}"
    loop = Loop(tmp_path, [1, 1, 0, 2], buffer, "algorithm.adv_estimator=ppo", "algorithm.lam=1")
    assert [item["raw_reward"] for item in loop.trajectories] == [1, 1, 0, 2]
    assert [item["reward"] for item in loop.trajectories] == [0.75, 0.75, -0.25, 1.75]
    assert loop.metrics["reward/overlong_penalty"] == -0.25
    assert sorted(item.returns[0] for item in loop.updated) == [-0.25, 0.75, 0.75, 1.75]


def test_ppo_learns_from_tokens(tmp_path):
    loop = Loop(tmp_path, [1, 0, 0, 1], "algorithm.adv_estimator=ppo")
    for sample in loop.updated:
        assert sample.old_values == [0.25] * LENGTH
        assert len(sample.advantages) == len(sample.returns) == LENGTH
        assert len(set(sample.advantages)) > 1
    for item in loop.trajectories:
        assert item["advantage"] == pytest.approx(sum(item["advantages"]) / LENGTH)
    assert loop.metrics["critic/explained_variance"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("level", "weight"), [("token", 2.0), ("sequence", 2.0)])
def test_weights_of_importance_sampling_reach_the_train_engine(tmp_path, level, weight):
    # The trainer finds e times the engine's probability, which is above the cap.
    loop = Loop(tmp_path, [1, 0, 0, 1], f"algorithm.rollout_correction.rollout_is={level}")
    assert all(sample.rollout_is_weights == [weight] * LENGTH for sample in loop.updated)
    assert loop.metrics["rollout_is/mean"] == weight
    assert loop.metrics["rollout_is/capped_fraction"] == 1
