"""The tool that measures a step beside TRL's: turns, what it refuses, what it asks of minirl."""

import os
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
sys.path.append(str(TOOLS))

from beside_trl import Shape, measure, minirl_arguments, ratio, table
from minirl_side import TrainerOnCommand, to_the_end
from side_process import Side, SideError
from turns import reward

from minirl.config import load_config
from minirl.trainer import Trainer
from minirl.value_checks import check_values

SIDE = """
import os, sys, threading, time
sys.path.append(sys.argv[1])
from turns import Turns


def restless():
    while True:
        pass


turns = Turns()
print("what libraries print")
if sys.argv[3] == "m":
    threading.Thread(target=restless, daemon=True).start()
turns.say()
for _ in range(3):
    turns.wait()
    with open(sys.argv[2], "a") as order:
        order.write(sys.argv[3] + " ")
    time.sleep(float(sys.argv[4]))
    turns.say(prompt_tokens=160, new_tokens=int(sys.argv[5]), phases={"generate": 0.5})
    if sys.argv[3] == "dies":
        sys.exit("the last words")
"""
SHAPE = Shape("model", "prompts.jsonl", "", "float32", 2, 4, 20, 8, 3, "float32", 8)


@pytest.fixture
def side(tmp_path):
    """Starts processes that sleep instead of training, and ends them."""
    started = []

    def start(name, word, seconds, new_tokens=64):
        program = ["-c", SIDE, str(TOOLS), str(tmp_path / "order"), word, str(seconds)]
        log = tmp_path / f"{name}.log"
        started.append(Side(name, [sys.executable, *program, str(new_tokens)], os.environ, log))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_sides_take_turns_and_the_first_step_does_not_count(side, tmp_path):
    sides = side("TRL", "t", 0.2), side("MiniRL", "m", 0.05)
    steps = measure(sides, SHAPE)
    for each in sides:
        each.finish()
    assert (tmp_path / "order").read_text().split() == ["t", "m"] * 3
    assert {name: len(own) for name, own in steps.items()} == {"TRL": 2, "MiniRL": 2}
    assert 0.1 < ratio(steps) < 0.9
    assert max(step.idle_cores for step in steps["TRL"]) < 0.1  # though it is never idle by itself
    lines = table(steps)
    assert lines[1].split()[4:6] == ["160", "64"]
    assert lines[-1] == "MiniRL, seconds of its phases: generate 0.50"
    assert sides[0].log.read_text() == "what libraries print\n"


def test_a_side_that_does_less_is_refused(side):
    sides = side("TRL", "t", 0), side("MiniRL", "m", 0, new_tokens=63)
    with pytest.raises(SideError, match=r"MiniRL: .*\(160, 63\), wanted \(160, 64\)"):
        measure(sides, SHAPE)


def test_a_side_that_dies_says_why(side):
    with pytest.raises(SideError, match=r"(?s)TRL has ended; .*the last words"):
        measure((side("TRL", "dies", 0), side("MiniRL", "m", 0)), SHAPE)


def test_minirl_does_one_optimizer_step_in_the_precision_that_was_asked_for():
    config = load_config(minirl_arguments(SHAPE, ["actor.engine_config.share_prefixes=false"]))
    check_values(config)
    assert config.actor.engine_config.dtype == config.rollout.dtype == "float32"
    assert not config.actor.engine_config.share_prefixes
    data = config.data
    assert data.train_batch_size * data.num_generations == config.algorithm.ppo_mini_batch_size
    assert to_the_end(config.rollout, 1).ignore_eos
    assert {"fit", "_step", "_report"} <= vars(TrainerOnCommand).keys() & vars(Trainer).keys()


def test_the_reward_varies():
    completions = [[{"role": "assistant", "content": text}] for text in ("aaaa", "abcd", "")]
    assert reward(completions, answer=[1, 2, 3]) == [0.25, 1.0, 0.0]
