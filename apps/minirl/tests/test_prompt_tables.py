"""Prompts from parquet files and saved Hugging Face datasets."""

import json
import shutil
import sys
import time
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from minirl.prompt_file import read_prompt_file
from rl_core.errors import ComponentNotFoundError, ConfigError

SAVED = Path(__file__).parent / "data" / "saved_dataset"
"""What `DatasetDict.save_to_disk` of datasets 5.2.0 wrote: two rows of one split, `train`."""

MESSAGE = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])


def write(path, columns, **schema):
    table = pyarrow.table(columns, **schema)
    parquet.write_table(table, path)
    return path


def test_texts_and_columns(tmp_path):
    columns = {"question": ["say 1:", "say \u00fc:"], "answer": [1, None], "tags": [["a"], []]}
    prompts = read_prompt_file(write(tmp_path / "p.parquet", columns), "question")
    assert [item.text for item in prompts] == ["say 1:", "say \u00fc:"]
    assert prompts[0].columns == {"answer": 1, "tags": ["a"]}
    assert prompts[1].origin == f"{tmp_path / 'p.parquet'} row 1"


def test_chats_whose_messages_have_different_fields(tmp_path):
    chat = [{"role": "system", "content": "brief", "name": "x"}, {"role": "user", "content": "hi"}]
    prompts = read_prompt_file(write(tmp_path / "p", {"prompt": [chat]}), "prompt")
    assert prompts[0].is_chat
    assert prompts[0].messages == chat


@pytest.mark.parametrize("kind", [pyarrow.large_string(), "dictionary"])
def test_other_kinds_of_text(tmp_path, kind):
    column = pyarrow.array(["a", "a"])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    prompts = read_prompt_file(write(tmp_path / "p.parquet", {"prompt": column}), "prompt")
    assert [item.text for item in prompts] == ["a", "a"]


def test_a_saved_dataset_as_the_library_writes_it():
    prompts = read_prompt_file(SAVED / "train", "question")
    assert [item.text for item in prompts] == ["say 2:", "sag \u00fc:"]
    assert [item.columns["label"] for item in prompts] == [1, 0]
    chats = read_prompt_file(SAVED / "train", "chat")
    assert chats[0].messages == [{"role": "user", "content": "hi"}]


def test_a_dataset_with_splits_names_them():
    with pytest.raises(ConfigError, match=rf"splits; give one of {SAVED / 'train'}$"):
        read_prompt_file(SAVED, "question")


WRONG = {
    "no such column": ({"promt": ["a"]}, "no column 'prompt' .*; the nearest is 'promt'"),
    "numbers": ({"prompt": [1, 2]}, "'prompt' has the type int64; a prompt is a text or a list"),
    "list of texts": ({"prompt": [["a"]]}, "has the type list.*string"),
    "other structs": ({"prompt": [[{"from": "user"}]]}, "has the type list.*from"),
    "null": ({"prompt": ["a", None]}, "row 1: the prompt is empty"),
    "blank": ({"prompt": ["a", " \n"]}, "row 1: the prompt is empty"),
    "no message": ({"prompt": pyarrow.array([[]], pyarrow.list_(MESSAGE))}, "row 0: .* is empty"),
    "no row": ({"prompt": pyarrow.array([], pyarrow.string())}, "there are no prompts in it"),
    "reserved": ({"prompt": ["a"], "completions": [1]}, "'completions' is an argument"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_in_one_line(tmp_path, wrong):
    columns, message = WRONG[wrong]
    path = write(tmp_path / "p.parquet", columns)
    with pytest.raises(ConfigError, match=message) as caught:
        read_prompt_file(path, "prompt")
    assert str(caught.value).count(str(path)) == 1
    assert str(caught.value).startswith(str(path))
    assert "cannot be read" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off(tmp_path):
    path = write(tmp_path / "p.parquet", {"prompt": ["a"] * 100})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"p\.parquet: cannot be read: ") as caught:
        read_prompt_file(path, "prompt")
    assert "\n" not in str(caught.value)


def test_a_saved_dataset_without_its_data(tmp_path):
    shutil.copytree(SAVED / "train", tmp_path / "ds")
    (tmp_path / "ds" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(ConfigError, match=r"ds: cannot be read: .*data-00000"):
        read_prompt_file(tmp_path / "ds", "question")
    (tmp_path / "ds" / "state.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="not as save_to_disk writes it"):
        read_prompt_file(tmp_path / "ds", "question")
    (tmp_path / "ds" / "dataset_dict.json").write_text(json.dumps({"splits": [5]}))
    with pytest.raises(ConfigError, match="not as save_to_disk writes it"):
        read_prompt_file(tmp_path / "ds", "question")


def test_any_other_directory(tmp_path):
    with pytest.raises(ConfigError, match="no saved dataset"):
        read_prompt_file(tmp_path, "prompt")


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "p.parquet", {"prompt": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ComponentNotFoundError, match=r"pip install 'rl-minirl\[data\]'"):
        read_prompt_file(path, "prompt")


def test_a_hundred_thousand_rows_are_read_quickly(tmp_path):
    columns = {"prompt": [f"{n} + {n}?" for n in range(100_000)], "answer": [*range(100_000)]}
    path = write(tmp_path / "p.parquet", columns)
    before = time.perf_counter()
    assert len(read_prompt_file(path, "prompt")) == 100_000
    assert time.perf_counter() - before < 5
