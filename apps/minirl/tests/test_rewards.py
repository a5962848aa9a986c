"""Reward functions from files: what they get, what they may do, and what happens if they fail."""

import contextlib
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.prompts import Prompt
from minirl.reward_process import PART_BYTES
from minirl.rewards import RewardError, load_scorer
from rl_core.errors import ConfigError

NO_DATA = SimpleNamespace(task="repeat", path="p.jsonl", reasoning_gym=None)
SUMS = {"name": "chain_sum", "min_terms": 2, "max_terms": 2}


def make_prompts(count, **columns):
    return [
        Prompt(
            index=at,
            messages=[{"role": "user", "content": f"p{at}"}],
            text=f"p{at}",
            prompt_ids=[1, 2],
            columns={name: values[at] for name, values in columns.items()},
        )
        for at in range(count)
    ]


@pytest.fixture
def load(tmp_path):
    """Make a scorer from the source of a reward file."""
    scorers = []

    def make(source, *, columns=(), held_out=None, timeout_s=20.0, name=""):
        path = tmp_path / "reward.py"
        path.write_text(source)
        reward = SimpleNamespace(path=f"{path}{name}", timeout_s=timeout_s)
        log = tmp_path / "reward.log"
        scorers.append(load_scorer(reward, NO_DATA, columns, log, held_out))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.close()


def run(scorer, completions, **columns):
    prompts = make_prompts(len(completions), **columns)
    return scorer.score(prompts, completions, [[5]] * len(completions))


def test_it_gets_trls_arguments(load, tmp_path):
    scorer = load(
        "def reward(prompts, completions, completion_ids, answer, **rest):\n"
        "    print(prompts, completions, completion_ids, answer, sorted(rest))\n"
        "    return [c == a for c, a in zip(completions, answer)]\n",
        columns=("answer", "level"),
    )
    assert run(scorer, ["a", "b"], answer=["a", "x"], level=[1, 2]) == [1.0, 0.0]
    printed = (tmp_path / "reward.log").read_text()
    assert "['p0', 'p1'] ['a', 'b'] [[5], [5]] ['a', 'x'] ['level']" in printed


def test_chats_come_as_messages(load):
    scorer = load(
        "def reward(prompts, completions, **_):\n"
        "    return [float(p[-1]['content'] == c[0]['content'] and c[0]['role'] == 'assistant')\n"
        "            for p, c in zip(prompts, completions)]\n"
    )
    chat = [Prompt(0, [{"role": "user", "content": "hi"}], "hi", [1], {}, is_chat=True)] * 2
    assert scorer.score(chat, ["hi", "ho"], [[1], [2]]) == [1.0, 0.0]


def test_only_what_it_takes_is_passed(load):
    scorer = load("def reward(completions):\n    return [len(c) for c in completions]\n")
    assert run(scorer, ["a", "bcd"], answer=[1, 2]) == [1.0, 3.0]


def test_a_column_that_a_prompt_lacks_is_none(load):
    scorer = load(
        "def reward(a, **_): return [1.0 if x is None else 0.0 for x in a]", columns=["a"]
    )
    prompts = [*make_prompts(1, a=[3]), *make_prompts(1)]
    assert scorer.score(prompts, ["", ""], [[], []]) == [0.0, 1.0]
    assert run(scorer, ["", ""]) == [1.0, 1.0]  # that no prompt of the batch has


def test_it_may_be_async_and_keep_its_loop(load):
    scorer = load(
        "import asyncio\n"
        "loops = set()\n"
        "async def reward(completions, **_):\n"
        "    await asyncio.sleep(0)\n"
        "    loops.add(id(asyncio.get_running_loop()))\n"
        "    return [float(len(loops))] * len(completions)\n"
    )
    assert [run(scorer, ["a"]) for _ in range(3)] == [[1.0]] * 3


def test_the_function_can_be_named_and_import_its_neighbours(load, tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("value = 0.25\n")
    scorer = load(
        "from neighbour_of_reward import value\n"
        "class Fixed:\n"
        "    def __call__(self, completions, **_): return [value for _ in completions]\n"
        "fixed = Fixed()\n",
        name=":fixed",
    )
    assert run(scorer, ["a"]) == [0.25]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=20))
def test_numbers_and_none_arrive_exactly(echo, values):
    assert run(echo, [repr(value) for value in values]) == values


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    path = tmp_path_factory.mktemp("echo") / "echo.py"
    path.write_text("def reward(completions, **_): return [eval(c) for c in completions]\n")
    scorer = load_scorer(SimpleNamespace(path=str(path), timeout_s=20), NO_DATA, ())
    yield scorer
    scorer.close()


def test_numbers_of_other_libraries_count(load):
    scorer = load(
        "import numpy\n"
        "def reward(completions, **_): return numpy.arange(len(completions), dtype='float32')\n"
    )
    assert run(scorer, ["a", "b"]) == [0.0, 1.0]


def test_a_batch_larger_than_a_message(load):
    scorer = load("def reward(completions): return [len(c) for c in completions]")
    sizes = [PART_BYTES, 3, PART_BYTES + 1]
    assert run(scorer, ["x" * size for size in sizes]) == sizes


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "'0.5'", "[1]"])
def test_what_is_no_reward_names_its_sample(load, value):
    scorer = load(
        "from math import inf, nan\n"
        f"def reward(completions, **_): return [{value} if c == 'bad' else 1 for c in completions]"
    )
    with pytest.raises(RewardError, match=r"for sample 2 \(prompt 2: 'p2'\)") as caught:
        run(scorer, ["a", "b", "bad", "c"])
    assert caught.value.samples == (2,)
    with pytest.raises(RewardError, match="for samples 0, 1, 2, 3 and 1 more"):
        run(scorer, ["bad"] * 5)
    with pytest.raises(
        RewardError, match=r"for samples 41, 42 \(the first has prompt 1:"
    ) as caught:
        scorer.score(make_prompts(3), ["a", "bad", "bad"], [[5]] * 3, 40)
    assert caught.value.samples == (41, 42)


FAILURES = {
    "raises": ("raise ValueError('no\\nway')", r"failed: ValueError: no way \(reward.py:4\)"),
    "exits": ("sys.exit(3)", r"failed: SystemExit: 3"),
    "crashes": ("os._exit(7)", r"ended its process \(exit code 7\)"),
    "hangs": ("time.sleep(60)", r"did not return within 0.4 s"),
    "holds the interpreter": ("re.match(r'(a+)+b', 'a' * 40)", r"did not return within 0.4 s"),
    "skips": ("return [1.0] * (len(completions) - 1)", r"returned 7 rewards for 8 samples"),
    "forgets": ("return None", r"failed: it returned NoneType"),
    "says": ("return 'abc'", r"failed: it returned str"),
    "maps": ("return dict.fromkeys(range(len(completions)), 1)", r"failed: it returned dict"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("at", [0, 5])
def test_a_failure_names_its_sample_and_the_next_call_works(make_failing, failure, at):
    body, message = FAILURES[failure]
    scorer = make_failing(body)
    completions = ["fine"] * 8
    completions[at] = "bad"
    with pytest.raises(RewardError, match=message) as caught:
        run(scorer, completions)
    assert caught.value.samples == (at,)
    assert f"for sample {at} (prompt {at}: 'p{at}')" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert run(scorer, ["fine"] * 8) == [1.0] * 8


@pytest.fixture
def make_failing(load):
    def make(body):
        return load(
            "import os, re, sys, time\n"
            "def reward(completions, **_):\n"
            "    if 'bad' in completions:\n"
            f"        {body}\n"
            "    return [1.0] * len(completions)\n",
            timeout_s=0.4,
        )

    return make


def test_a_failure_that_only_the_whole_batch_shows_names_all(load):
    scorer = load("def reward(completions, **_): return [1 / (3 - len(completions))] * 3")
    with pytest.raises(RewardError, match="for samples 0, 1, 2 ") as caught:
        run(scorer, ["a", "b", "c"])
    assert caught.value.samples == (0, 1, 2)


def test_a_hanging_function_is_killed_with_its_children(load, tmp_path):
    scorer = load(
        "import os, pathlib, subprocess\n"
        "def reward(completions, **_):\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        f"    file = pathlib.Path({str(tmp_path / 'pids')!r})\n"
        "    file.write_text(f'{os.getpid()} {child.pid}')\n"
        "    child.wait()\n",
        timeout_s=0.5,
    )
    with pytest.raises(RewardError, match="did not return"):
        run(scorer, ["a"])
    assert_gone(*map(int, (tmp_path / "pids").read_text().split()))


def assert_gone(*pids):
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def alive(pid):
    """Neither gone nor a zombie that its new parent has not collected yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_closing_ends_the_process(load):
    scorer = load("def reward(completions, **_): return [1.0] * len(completions)")
    pid = scorer._process.pid
    assert psutil.pid_exists(pid)
    scorer.close()
    scorer.close()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("body", ["time.sleep(60)", "pass"])
def test_the_process_ends_with_the_run_even_if_that_is_killed(tmp_path, body):
    (tmp_path / "reward.py").write_text(
        f"import os, time\n"
        f"def reward(completions, **_):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        f"    {body}\n"
        f"    return [1.0]\n"
    )
    code = (
        "import os, signal, sys, threading\n"
        "from minirl.reward_messages import Target\n"
        "from minirl.reward_process import RewardProcess\n"
        "process = RewardProcess(Target(name='reward', path=sys.argv[1]))\n"
        "threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()\n"
        "process.call({'completions': ['a']}, 30)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "reward.py")], check=False)
    assert_gone(int((tmp_path / "pid").read_text()))


def test_no_descriptor_is_left_open(load):
    def count():
        return len(os.listdir("/proc/self/fd"))

    load("def reward(**_): return []").close()
    before = count()
    for _ in range(3):
        load("def reward(**_): return []").close()
    assert count() == before


BAD_FILES = {
    "def other(**_): ...\ndef _help(): ...": r"no function 'reward'; functions there: other, _help",
    "reward = 3": "no function 'reward'",
    "import nothing_like_this": r"ModuleNotFoundError: .*nothing_like_this.* \(reward.py:1\)",
    "def reward(:": "SyntaxError",
    "raise SystemExit(2)": "SystemExit: 2",
    "import os; os._exit(9)": r"ended the process \(exit code 9\)",
    "def reward(completions, gold): ...": "needs 'gold', the data set has .*answer",
    "def reward(): ...": "takes none of completions, completion_ids",
    "def reward(answer, /, **_): ...": "takes 'answer' by position only; .* by name",
    "class reward: ...": "'reward' is a class, not a function",
}


@pytest.mark.parametrize("source", BAD_FILES)
def test_a_bad_file_is_a_config_error_of_one_line(load, source):
    with pytest.raises(ConfigError, match=BAD_FILES[source]) as caught:
        load(source, columns=("answer",))
    assert "\n" not in str(caught.value)
    assert not [child for child in psutil.Process().children() if "reward_worker" in str(child)]


def test_a_column_that_the_held_out_set_lacks(load):
    source = "def reward(completions, gold): ..."
    load(source, columns=("gold",), held_out=("gold", "level"))
    with pytest.raises(ConfigError, match=r"'gold', the held-out set \(data\.eval_path\) has"):
        load(source, columns=("gold",), held_out=("level",))


def test_missing_file_and_missing_function(tmp_path, load):
    reward = SimpleNamespace(path=str(tmp_path / "none.py"), timeout_s=1)
    with pytest.raises(ConfigError, match=r"no file .*none\.py"):
        load_scorer(reward, NO_DATA, ())
    with pytest.raises(ConfigError, match="no function 'score'; functions there: reward"):
        load("def reward(**_): ...", name=":score")
    reward.path = "~nosuchuser/reward.py"
    with pytest.raises(ConfigError, match=r"no file ~nosuchuser/reward\.py"):
        load_scorer(reward, NO_DATA, ())


def test_prompts_from_a_file_need_a_reward():
    with pytest.raises(ConfigError, match=r"data\.path needs reward\.path"):
        load_scorer(SimpleNamespace(path=None, timeout_s=1), NO_DATA, ())


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan])
def test_a_timeout_that_is_none(timeout):
    with pytest.raises(ConfigError, match=r"reward\.timeout_s"):
        load_scorer(SimpleNamespace(path=None, timeout_s=timeout), NO_DATA, ())


def test_the_default_task_scores_in_process():
    data = SimpleNamespace(task="repeat", path=None, reasoning_gym=None)
    scorer = load_scorer(SimpleNamespace(path=None, timeout_s=1), data, ())
    prompt = Prompt(0, [], "say 7:", [1], {})
    assert scorer.score([prompt] * 2, ["7777", "8"], [[1], [2]]) == [0.5, 0.0]
    scorer.close()


def test_reasoning_gym_scores_with_its_own_scorer():
    from minirl.reasoning_gym_task import Problems

    data = SimpleNamespace(task="repeat", path=None, reasoning_gym=SUMS)
    raw, _ = Problems.from_config({**SUMS, "size": 4}, seed=1).split(0)
    prompts = [Prompt(r.index, r.messages, r.text, [1], r.columns) for r in raw]
    scorer = load_scorer(SimpleNamespace(path=None, timeout_s=20), data, ("entry", "answer"))
    completions = [f" {p.columns['answer']}\n" for p in prompts]
    completions[1] = "no idea"
    assert scorer.score(prompts, completions, [[1]] * 4) == [1.0, 0.0, 1.0, 1.0]
    scorer.close()


def test_the_worker_imports_no_heavy_library():
    code = (
        "import sys, minirl.reward_worker\n"
        "heavy = {'torch', 'transformers', 'ray', 'omegaconf', 'reasoning_gym', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
