"""A task in one Python file: what it may define, and what it may do wrong."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from data_settings import settings_with
from transformers import PreTrainedTokenizerFast

from minirl.char_tokenizer import write_tokenizer
from minirl.prompts import load_prompts
from minirl.reward_mix import load_rewards
from minirl.task_file import read_task_file
from rl_core.errors import ConfigError

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture
def task(tmp_path):
    def write(source):
        (tmp_path / "task.py").write_text(source)
        return tmp_path / "task.py"

    return write


@pytest.fixture
def tokenizer(tmp_path):
    write_tokenizer(tmp_path, 1024)
    return PreTrainedTokenizerFast.from_pretrained(tmp_path)


def test_the_one_in_the_readme(task, tokenizer):
    source = re.search(r"```python\n(# task.py.*?)```", README.read_text(), re.DOTALL)[1]
    assert 20 <= len(source.splitlines()) <= 40
    data = settings_with(task=str(task(source)), eval_size=4)
    train, held_out = load_prompts(data, tokenizer, seed=1)
    assert len(held_out) == 4
    assert {item.text for item in train}.isdisjoint(item.text for item in held_out)
    settings = SimpleNamespace(path=None, weights=None, timeout_s=20.0)
    mix = load_rewards(settings, data, train.columns)
    prompts = [train[0]] * 3
    right = train[0].columns["answer"]
    scores = mix.score(prompts, [right + "...", "?", ""], [[1]] * 3)
    mix.close()
    assert [score.total for score in scores] == [1.0, 0.0, 0.0]
    assert list(scores[0].parts) == ["task"]


def test_texts_chats_and_mappings(task):
    chat = [{"role": "user", "content": "hi"}]
    train, held_out = read_task_file(task("prompts = ('a', {'q': 'b', 'n': 1})"), "q")
    assert [item.text for item in train] == ["a", "b"]
    assert train[1].columns == {"n": 1}
    assert held_out is None
    train, held_out = read_task_file(
        task(f"def prompts():\n    yield {chat}\n\neval_prompts = [{chat}] * 2\n"), "prompt"
    )
    assert train[0].messages == chat
    assert len(held_out) == 2


def test_it_may_print_and_import_its_neighbours(task, tmp_path):
    (tmp_path / "neighbour_of_task.py").write_text("value = 'x'\n")
    source = "from neighbour_of_task import value\nprint('said')\nprompts = [value]\n"
    train, _ = read_task_file(task(source), "prompt", tmp_path / "log")
    assert train[0].text == "x"
    assert (tmp_path / "log").read_text() == "said\n"


WRONG = {
    "def reward(**_): ...": "task.py: it defines no prompts",
    "prompts = 'abc'": "prompts is str, not a list",
    "def prompts():\n    return 1 / 0": r"ZeroDivisionError: division by zero \(task.py:2\)",
    "import nothing_like_this": "ModuleNotFoundError: .*nothing_like_this",
    "import os; os._exit(7)": r"it ended its process \(exit code 7\)",
    "prompts = [object()]": "TypeError: .*object",
    "prompts = []": "task.py prompts: there are no prompts in it",
    "prompts = ['a', {'promt': 'b'}]": r"prompts\[1\]: no key 'prompt' .*nearest is 'promt'",
    "prompts = [{'prompt': 'a', 3: 4}]": r"prompts\[0\]: the key 3 is no text",
    "prompts = ['a']; eval_prompts = [3]": r"eval_prompts\[0\]: the prompt is neither",
}


@pytest.mark.parametrize("source", WRONG)
def test_what_is_wrong_is_said_in_one_line(task, source, tmp_path):
    with pytest.raises(ConfigError, match=WRONG[source]) as caught:
        read_task_file(task(source), "prompt", tmp_path / "log")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.task=.*none\.py: no such file"):
        read_task_file(tmp_path / "none.py", "prompt")


def test_too_few_prompts_to_hold_out(task, tokenizer):
    data = settings_with(task=str(task("prompts = ['a', 'b']")), eval_size=2)
    with pytest.raises(ConfigError, match=r"task\.py has only 2 prompts"):
        load_prompts(data, tokenizer, seed=1)


def test_prompts_come_from_one_source(task, tokenizer):
    data = settings_with(task=str(task("prompts = ['a']")), path="p.jsonl")
    with pytest.raises(ConfigError, match=r"data\.path and data\.task=.* exclude each other"):
        load_prompts(data, tokenizer, seed=1)
