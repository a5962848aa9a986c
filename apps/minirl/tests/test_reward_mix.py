"""Several reward functions: their sum, their names, and weights that do not match."""

from types import SimpleNamespace

import psutil
import pytest

from minirl.prompts import Prompt
from minirl.reward_mix import RewardMix, load_rewards, part_metrics
from rl_core.errors import ConfigError

DATA = SimpleNamespace(task="repeat", path="p.jsonl", reasoning_gym=None)
REPEAT = SimpleNamespace(task="repeat", path=None, reasoning_gym=None)
PROMPTS = [Prompt(0, [], "say 7:", [1], {}) for _ in range(3)]


@pytest.fixture
def load(tmp_path):
    made = []

    def make(paths, weights=None, data=DATA):
        given = [f"{tmp_path}/{path}" for path in paths] if isinstance(paths, list) else paths
        settings = SimpleNamespace(path=given, weights=weights, timeout_s=20.0)
        made.append(load_rewards(settings, data, ("answer",)))
        return made[-1]

    (tmp_path / "length.py").write_text(
        "def reward(completions, **_): return [float(len(text)) for text in completions]\n"
        "def some(completions, **_): return [None if text == '' else 1 for text in completions]\n"
    )
    (tmp_path / "other.py").write_text(
        "def reward(completions, **_): return [0.5] * len(completions)\n"
        "def some(completions, **_): return [2 if t in 'ay' and t else None for t in completions]\n"
    )
    yield make
    for mix in made:
        mix.close()


def test_the_total_is_the_weighted_sum_and_each_part_is_told(load):
    mix = load(["length.py", "other.py"], [1.0, -2.0])
    scores = mix.score(PROMPTS, ["a", "bcd", ""], [[1]] * 3)
    assert [score.total for score in scores] == [0.0, 2.0, -1.0]
    assert scores[1].parts == {"length": 3.0, "other": 0.5}


def test_none_counts_for_nothing_and_all_none_is_no_reward(load):
    mix = load(["length.py:some", "other.py:some"], [1.0, 10.0])
    scores = mix.score(PROMPTS, ["a", "x", ""], [[1]] * 3)
    assert [score.total for score in scores] == [21.0, 1.0, None]
    assert scores[1].parts == {"length.some": 1.0, "other.some": None}
    metrics = part_metrics(score.parts for score in scores)
    assert metrics["reward/other.some/mean"] == 2.0
    assert metrics["reward/length.some/mean"] == 1.0
    assert metrics["reward/length.some/std"] == 0.0


def test_one_function_twice_has_two_names(load):
    mix = load(["length.py", "length.py"], [1.0, 1.0])
    assert list(mix.score(PROMPTS[:1], ["ab"], [[1]])[0].parts) == [
        "length.reward_1",
        "length.reward_2",
    ]


def test_without_weights_all_count_alike(load):
    assert load(["length.py", "other.py"]).score(PROMPTS[:1], ["ab"], [[1]])[0].total == 2.5


def test_the_task_has_one_of_its_own(load):
    score = load(None, [2.0], REPEAT).score(PROMPTS[:1], ["7777"], [[1]])[0]
    assert (score.total, score.parts) == (1.0, {"repeat": 0.5})


@pytest.mark.parametrize(
    ("paths", "weights", "message"),
    [
        (["length.py", "other.py"], [1.0], r"\[1.0\]: 1 weights for 2 reward functions \(/.*, /"),
        (["length.py"], [], r"\[\]: 0 weights for 1 reward functions"),
        (None, [1.0, 2.0], "2 weights for 1 reward functions .the task's own"),
    ],
)
def test_weights_that_do_not_match(load, paths, weights, message):
    with pytest.raises(ConfigError, match=message):
        load(paths, weights, DATA if paths else REPEAT)


def test_if_the_second_cannot_be_loaded_the_first_is_closed(load):
    with pytest.raises(ConfigError, match="no function 'nothing'"):
        load(["length.py", "other.py:nothing"])
    assert not [child for child in psutil.Process().children() if "reward_worker" in str(child)]


def test_every_function_is_asked_once_for_all_samples():
    calls = []

    class Counting:
        def score(self, prompts, completions, completion_ids, first):
            calls.append(list(completions))
            return [1.0] * len(completions)

    mix = RewardMix({"a": Counting(), "b": Counting()}, [1.0, 1.0])
    assert [score.total for score in mix.score(PROMPTS, ["x", "y", "z"], [[1]] * 3)] == [2.0] * 3
    assert calls == [["x", "y", "z"]] * 2
