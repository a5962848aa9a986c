"""Rewards of a group while others are generated: when, of what, and what ends it."""

import math
import threading
import time
from concurrent.futures import Future
from unittest.mock import MagicMock

import psutil
import pytest
from two_replicas import LIMIT_S, Fleet, patch, request

from minirl import generation_watch
from minirl.config import load_config
from minirl.early_rewards import EarlyRewards
from minirl.generation_watch import GenerationLimits, GenerationWatch
from minirl.interruption import Interrupted
from minirl.prompts import Prompt
from minirl.reward_messages import Target
from minirl.reward_mix import RewardMix
from minirl.reward_scorer import FunctionScorer, RewardError
from minirl.rewards import InProcessScorer
from minirl.sampling import Question, make_requests
from minirl.timing import StepTimer
from minirl.trainer import Trainer
from rl_core.testing.thread_launcher import ThreadHandle
from rl_core.trajectory import Completion

SMALL = (
    "data.train_batch_size=3",
    "data.num_generations=2",
    "algorithm.ppo_mini_batch_size=6",
    "rollout.max_completion_length=6",
)
EARLY = "reward.per_group=true"


@pytest.fixture
def make_fleet(monkeypatch, tmp_path):
    made = []

    def make(**settings):
        made.append(Fleet(tmp_path, **{"goes_on": False, **settings}))
        made[-1].publish(0)
        return made[-1]

    patch(monkeypatch)
    yield make
    for fleet in made:
        fleet.close()


def prompt(number):
    return Prompt(number, [], f"say {number}:", [3, 5, number + 1], {})


def collect(fleet, functions, *overrides, weights=(1.0,)):
    """Samples of a step, and its times."""
    config = load_config([*SMALL, *overrides])
    numbers = iter(range(99))
    data = MagicMock(held_out=[], decode=lambda sequences: [str(one) for one in sequences])
    data.loader.next_batch = lambda: [
        prompt(next(numbers)) for _ in range(config.data.train_batch_size)
    ]
    scorers = {each.__name__: InProcessScorer(each, each.__name__) for each in functions}
    data.scorer = RewardMix(scorers, weights)
    system = MagicMock(rollout=fleet.manager)
    timer = StepTimer()
    samples = Trainer(config, data, MagicMock(), system)._collect(timer, 1)
    return samples, timer.metrics()


def hold(servers, part, until):
    """No token for requests with `part` in their names, before that event."""
    for server in servers:
        engine = server._object._engine

        def step(queued, step=engine._step):
            if part not in queued.request.request_id or until.is_set():
                step(queued)

        engine._step = step


class Calls:
    """A reward function, and which prompts it was called for."""

    __name__ = "calls"

    def __init__(self):
        self.prompts = []
        self.two = threading.Event()

    def __call__(self, prompts, completions, completion_ids):
        assert len(set(prompts)) == 1
        self.prompts.append(prompts[0])
        if len(self.prompts) == 2:
            self.two.set()
        return [1.0] * len(prompts)


def test_a_group_is_scored_while_another_is_generated(make_fleet):
    """Each replica owes a sample of prompt 1 until the others were scored."""
    fleet, calls = make_fleet(), Calls()
    hold(fleet.servers, ".p1.", calls.two)
    samples, timing = collect(fleet, [calls], EARLY)
    assert sorted(calls.prompts[:2]) == ["say 0:", "say 2:"]
    assert calls.prompts[2:] == ["say 1:"]
    assert [sample.raw_reward for sample in samples] == [1.0] * 6
    phases = sum(timing.values()) - 2 * timing["timing_s/step"]
    assert phases == pytest.approx(timing["timing_s/reward_beside_generate"])


def ranked(prompts, completions, completion_ids):
    """Compares the samples of a prompt; says nothing of prompt 1."""
    pairs = [(name, sum(ids)) for name, ids in zip(prompts, completion_ids, strict=True)]
    return [
        None if "1" in name else sum(other == name and less < own for other, less in pairs)
        for name, own in pairs
    ]


def some(prompts, completions, completion_ids):
    """Rewards a few samples, none of prompt 1."""
    return [
        None if ids[0] % 2 else len(text)
        for text, ids in zip(completions, completion_ids, strict=True)
    ]


class SupportsNothing:
    """No adapter is one."""


@pytest.mark.parametrize("told", [True, False])
def test_samples_and_rewards_are_the_same_as_those_of_the_whole_batch(
    make_fleet, monkeypatch, told
):
    """Dynamic sampling included; a backend that tells nothing early gives them in the end."""
    if not told:
        monkeypatch.setattr(generation_watch, "SupportsEarlyCompletions", SupportsNothing)
    dynamic = "algorithm.filter_groups={enable: true, max_num_gen_batches: 2}"
    given = ([ranked, some], "data.num_generations=3", "algorithm.ppo_mini_batch_size=9", dynamic)
    fleet = make_fleet()
    whole, before = collect(fleet, *given, weights=[1.0, 0.5])
    groups, after = collect(fleet, *given, EARLY, weights=[1.0, 0.5])
    assert groups == whole
    assert len({sample.group for sample in whole}) == 6
    rewards = [tuple(sample.rewards.values()) for sample in whole]
    assert {None, 1} < {value for row in rewards for value in row}
    assert after.keys() - before.keys() == {"timing_s/reward_beside_generate"}


def test_a_failure_ends_generation_and_names_its_sample_in_the_batch(make_fleet):
    def bad(prompts, completions, completion_ids):
        return [1.0, math.nan if "2" in prompts[0] else 1.0]

    fleet, never = make_fleet(), threading.Event()
    hold(fleet.servers, ".p0.", never)
    with pytest.raises(RewardError, match=r"for sample 5 \(prompt 2: 'say 2:'\)") as caught:
        collect(fleet, [bad], EARLY)
    assert caught.value.samples == (5,)
    assert {one.request.request_id for one in fleet.servers[0]._object._engine._queue} == {
        "s1.p0.g0",
        "s1.p0.g1",
    }
    assert fleet.publish(1).error is None
    assert {str(versions) for versions, _ in fleet.ask()} == {"{'e1.s1'}"}


def test_what_a_replica_told_before_it_was_given_up_stays(make_fleet, monkeypatch):
    """Only the rest is asked of the other one, so that nothing is scored twice."""
    fleet, never = make_fleet(goes_on=True), threading.Event()
    hold(fleet.servers[1:], "w3", never)
    given, asked, submit = [], [], ThreadHandle.submit

    def noting(handle, method, *args, **kwargs):
        if method == "generate":
            asked.append([one.request_id for one in args[0]])
        return submit(handle, method, *args, **kwargs)

    def on_ended(completions):
        given.extend(completions)
        if "w2" in {one.request_id for one in completions}:
            fleet.servers[1].kill()

    monkeypatch.setattr(ThreadHandle, "submit", noting)
    found = fleet.manager.generate([request(f"w{number}") for number in range(4)], on_ended)
    assert asked == [["w0", "w1"], ["w2", "w3"], ["w3"]]
    assert list(fleet.manager.given_up) == [1]
    assert sorted(given, key=lambda one: one.request_id) == found


def test_what_was_aborted_waits_for_its_call():
    """If that fails, it is asked again elsewhere."""
    asked = []

    class Leader:
        def finished(self, request_ids, wait, timeout):
            asked.append(list(request_ids))
            reasons = {"w0": "stop", "w1": "abort"}
            return [Completion(name, [1], [-1.0], reasons[name], []) for name in request_ids[:2]]

    call, limits = Future(), GenerationLimits(LIMIT_S, LIMIT_S)
    requests = [request(name) for name in ("w0", "w1")]
    watch = GenerationWatch(call, Leader(), limits, requests)
    assert [one.request_id for one in watch.news(1)] == ["w0"]
    assert watch.news(0.001) == []
    assert (asked, watch.over) == ([["w0", "w1"]], False)
    call.set_result(["w0", "w1"])
    assert (watch.news(1), watch.over) == (["w0", "w1"], True)


def test_nobody_waits_for_a_function_when_the_run_ends(tmp_path):
    (tmp_path / "reward.py").write_text(
        "import os, pathlib, time\n"
        "def reward(completions, **_):\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    scorer = FunctionScorer(Target(name="reward", path=str(tmp_path / "reward.py")), 60.0)
    prompts = [prompt(1)]
    requests = make_requests(prompts, 2, load_config([]).rollout, "s1", 1)

    def score(samples, first):
        scorer.score([one.prompt for one in samples], [one.text for one in samples], [[], []])

    early = EarlyRewards(
        Question(prompts, requests),
        lambda sequences: [""] * len(sequences),
        score,
        scorer.cut_short,
    )

    def begin():
        with early:
            early.add([Completion(one.request_id, [], [], "stop", []) for one in requests])
            deadline = time.monotonic() + LIMIT_S
            while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            raise Interrupted(15)

    with pytest.raises(Interrupted):
        begin()
    assert not early._thread.is_alive()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    with pytest.raises(RewardError, match="cut short"):
        scorer.score(prompts, [""], [[]])
    scorer.close()
