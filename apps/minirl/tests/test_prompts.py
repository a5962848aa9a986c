"""Reading, splitting and ordering prompts."""

import json
import logging
import time
from collections import Counter

import pytest
from data_settings import settings_with
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from minirl.char_tokenizer import write_tokenizer
from minirl.prompt_file import read_prompt_file
from minirl.prompt_loader import PromptLoader
from minirl.prompts import load_prompts
from rl_core.errors import ConfigError


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, 1024)
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    return AutoTokenizer.from_pretrained(directory)


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_the_default_task(tokenizer):
    sets = load_prompts(settings_with(eval_size=32), tokenizer, seed=1)
    assert len(sets.train) == 32
    assert Counter(prompt.text for prompt in sets.held_out).most_common(1)[0][1] == 4
    first = sets.train[0]
    assert first.messages == [{"role": "user", "content": first.text}]
    assert tokenizer.decode(first.prompt_ids) == f"<|user|>{first.text}<|end|><|assistant|>"
    assert [prompt.index for prompt in sets.train] == list(range(32))


def test_a_file_of_texts(tokenizer, tmp_path):
    records = [{"prompt": f"sum {n}", "answer": n} for n in range(5)]
    records[3]["extra"] = [1, None]
    path = write_jsonl(tmp_path / "p.jsonl", records)
    train, held_out = load_prompts(settings_with(path=path), tokenizer, seed=1)
    assert len(held_out) == 0
    assert train.columns == ("answer", "extra")
    assert train[3].columns == {"answer": 3, "extra": [1, None]}
    assert not train[3].is_chat


def test_columns_are_those_of_the_whole_source(tokenizer, tmp_path):
    """A batch, or what is held out, may lack some: reward functions get None."""
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "x": 1}, {"prompt": "b", "y": 2}])
    own = write_jsonl(tmp_path / "own.jsonl", [{"prompt": "c", "z": 3}, {"prompt": "d", "u": 4}])
    train, held_out = load_prompts(settings_with(path=path, eval_size=1), tokenizer, seed=1)
    assert train.columns == held_out.columns == ("x", "y")
    options = settings_with(path=path, eval_path=own, eval_size=1)
    train, held_out = load_prompts(options, tokenizer, seed=1)
    assert (train.columns, held_out.columns) == (("x", "y"), ("z", "u"))
    assert train[:1].columns == ("x", "y")


def test_a_file_of_chats(tokenizer, tmp_path):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    path = write_jsonl(tmp_path / "p.jsonl", [{"q": chat}])
    prompt = load_prompts(settings_with(path=path, prompt_key="q"), tokenizer, seed=1).train[0]
    assert prompt.is_chat
    assert prompt.text == "hi"
    assert prompt.messages == chat
    assert tokenizer.decode(prompt.prompt_ids).startswith("<|system|>be brief<|end|><|user|>hi")


def test_blank_lines_and_non_ascii_texts_are_fine(tokenizer, tmp_path, caplog):
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": "caf\u00e9"}\n\r\n{"prompt": "\\ud83d\\ude00"}\n', "utf-8")
    train = load_prompts(settings_with(path=str(path)), tokenizer, seed=1).train
    assert [prompt.text for prompt in train] == ["caf\u00e9", "\U0001f600"]
    assert f"{path}:2 and 1 more" in caplog.text


def test_a_prompt_beyond_the_models_length_is_told_by_us_alone(tokenizer, tmp_path, caplog):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "7" * 1100}])
    transformers_log = logging.getLogger("transformers")
    transformers_log.addHandler(caplog.handler)
    try:
        with pytest.raises(ConfigError, match=r"p\.jsonl:1: the prompt has 1\d\d\d tokens"):
            load_prompts(settings_with(path=path), tokenizer, seed=1)
    finally:
        transformers_log.removeHandler(caplog.handler)
    assert caplog.text == ""


BAD_LINES = {
    '{"prompt": "a"': "not a JSON object",
    "[1]": "not a JSON object",
    '{"promt": "a"}': "no key 'prompt' .*nearest is 'promt'",
    "{}": "no key 'prompt'",
    '{"prompt": "  "}': "the prompt is empty",
    '{"prompt": []}': "the prompt is empty",
    '{"prompt": 7}': "neither a text nor a list of messages",
    '{"prompt": [{"role": "user"}]}': "lacks 'role' or 'content'",
    '{"prompt": "a", "answer": 18446744073709551616}': "'answer' cannot go to a reward function",
    '{"prompt": [{"role": "user", "content": [1]}]}': "neither a text nor a list",
    '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}': (
        "ends with the assistant"
    ),
    '{"prompt": [{"role": "user", "content": "a"}]}': "mixed",
    '{"prompt": "a", "completions": 1}': "'completions' is an argument",
    '{"prompt": "\\ud800"}': "not a JSON object",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=BAD_LINES[line]) as caught:
        read_prompt_file(path, "prompt")
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_invalid_utf8_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xff\xfe"}\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: not a JSON object"):
        read_prompt_file(path, "prompt")


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file(tmp_path, content):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="no prompts"):
        read_prompt_file(tmp_path / "p.jsonl", "prompt")


def test_the_mark_that_some_editors_put_before_a_text_is_none_of_it(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    assert [item.text for item in read_prompt_file(path, "prompt")] == ["a"]


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.jsonl: cannot be read"):
        read_prompt_file(tmp_path / "nothing.jsonl", "prompt")


def test_a_prompt_that_is_too_long_is_named_with_the_limit(tokenizer, tmp_path):
    records = [{"prompt": "short"}, {"prompt": "x" * 48}]
    path = write_jsonl(tmp_path / "p.jsonl", records)
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: .* 51 tokens, .*max_prompt_length is 50"):
        load_prompts(settings_with(path=path, max_prompt_length=50), tokenizer, seed=1)
    assert load_prompts(settings_with(path=path, max_prompt_length=51), tokenizer, seed=1)


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), limit=st.integers(4, 50))
def test_the_length_check_misses_none(tokenizer, tmp_path_factory, lengths, limit):
    path = tmp_path_factory.mktemp("p") / "p.jsonl"
    write_jsonl(path, [{"prompt": "x" * length} for length in lengths])
    fits = max(lengths) + 3 <= limit
    try:
        load_prompts(settings_with(path=str(path), max_prompt_length=limit), tokenizer, seed=1)
    except ConfigError:
        assert not fits
    else:
        assert fits


def test_what_a_template_adds_depends_on_the_roles(tokenizer, tmp_path, monkeypatch):
    """Many put a system message in front of a chat that has none; here nine tokens."""
    added = "{% if messages[0].role != 'system' %}" + 9 * "<|user|>" + "{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", added + tokenizer.chat_template)
    chats = [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}],
        [{"role": "user", "content": "y" * 10}],
    ]
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": chat} for chat in chats])
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: the prompt has 22 tokens"):
        load_prompts(settings_with(path=path, max_prompt_length=21), tokenizer, seed=1)
    train = load_prompts(settings_with(path=path, max_prompt_length=22), tokenizer, seed=1).train
    assert len(train[1].prompt_ids) == 22


def long_and_short(tmp_path):
    texts = ["x", "y" * 60, "caf\u00e9 " * 20, "z" * 40]
    return write_jsonl(tmp_path / "p.jsonl", [{"prompt": text} for text in texts])


def test_prompts_that_are_too_long_may_be_left_out(tokenizer, tmp_path, caplog):
    options = settings_with(
        path=long_and_short(tmp_path), max_prompt_length=43, on_long_prompt="drop", eval_size=1
    )
    train, held_out = load_prompts(options, tokenizer, seed=1)
    assert sorted(item.text[0] for item in [*train, *held_out]) == ["x", "z"]
    assert {item.index for item in [*train, *held_out]} == {0, 3}
    assert "2 of 4 prompts have more than 43 tokens and were left out (the first: " in caplog.text


def test_prompts_that_are_too_long_may_be_cut(tokenizer, tmp_path, caplog):
    options = settings_with(
        path=long_and_short(tmp_path), max_prompt_length=43, on_long_prompt="truncate"
    )
    train = load_prompts(options, tokenizer, seed=1).train
    assert [item.text for item in train] == ["x", "y" * 40, ("caf\u00e9 " * 20)[-40:], "z" * 40]
    assert [len(item.prompt_ids) for item in train] == [4, 43, 43, 43]
    assert train[1].messages == [{"role": "user", "content": "y" * 40}]
    assert "2 of 4 prompts have more than 43 tokens and were cut" in caplog.text


def test_of_a_chat_the_last_user_message_is_cut(tokenizer, tmp_path):
    chat = [{"role": "system", "content": "brief"}, {"role": "user", "content": "x" * 50 + "?"}]
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": chat}])
    options = settings_with(path=path, max_prompt_length=20, on_long_prompt="truncate")
    prompt = load_prompts(options, tokenizer, seed=1).train[0]
    assert prompt.messages == [chat[0], {"role": "user", "content": prompt.text}]
    assert prompt.text == "xxxxxxxxx?"
    assert len(prompt.prompt_ids) == 20
    options.max_prompt_length = 8
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: cannot be cut to .*=8"):
        load_prompts(options, tokenizer, seed=1)


def test_not_all_prompts_may_be_left_out(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "x" * 60}])
    options = settings_with(path=path, max_prompt_length=43, on_long_prompt="drop")
    with pytest.raises(ConfigError, match="every prompt is longer"):
        load_prompts(options, tokenizer, seed=1)


def test_a_hundred_thousand_lines_are_read_quickly(tokenizer, tmp_path):
    texts = [{"prompt": f"caf\u00e9 {n} + {n}?", "answer": 2 * n} for n in range(100_000)]
    path = write_jsonl(tmp_path / "p.jsonl", texts)
    before = time.perf_counter()
    train = load_prompts(settings_with(path=path, eval_size=8), tokenizer, seed=1).train
    assert time.perf_counter() - before < 5
    assert len(train) == 100_000 - 8


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 100), eval_size=st.integers(1, 19))
def test_held_out_lines_are_never_trained_on(tokenizer, tmp_path_factory, seed, eval_size):
    path = tmp_path_factory.mktemp("p") / "p.jsonl"
    write_jsonl(path, [{"prompt": f"p{index % 17}"} for index in range(20)])
    options = settings_with(path=str(path), eval_size=eval_size)
    try:
        train, held_out = load_prompts(options, tokenizer, seed)
    except ConfigError as error:
        assert "every prompt is in the evaluation set" in str(error)  # noqa: PT017
        return
    assert len(held_out) == eval_size
    assert {item.text for item in train}.isdisjoint(item.text for item in held_out)
    again = load_prompts(options, tokenizer, seed)
    assert [item.index for item in again.held_out] == [item.index for item in held_out]


def test_an_evaluation_file_of_its_own(tokenizer, tmp_path, caplog):
    caplog.set_level(logging.INFO, "minirl")
    path = write_jsonl(tmp_path / "train.jsonl", [{"prompt": f"p{n}"} for n in range(6)])
    other = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": f"p{n}"} for n in (4, 9)])
    options = settings_with(path=path, eval_path=other, eval_size=4)
    train, held_out = load_prompts(options, tokenizer, seed=1)
    assert [item.text for item in held_out] == ["p4", "p9", "p4", "p9"]
    assert [item.text for item in train] == ["p0", "p1", "p2", "p3", "p5"]
    assert "eval.jsonl" not in caplog.text
    options.eval_size = 1
    assert [item.text for item in load_prompts(options, tokenizer, seed=1).held_out] == ["p4"]
    assert "eval.jsonl: the first 1 of 2 prompts" in caplog.text


def test_chats_with_other_roles_are_other_prompts(tokenizer, tmp_path):
    def digest(*roles):
        chat = [{"role": role, "content": "x"} for role in roles]
        path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": chat}])
        return load_prompts(settings_with(path=path), tokenizer, seed=1).train.digest

    assert digest("system", "user") == digest("system", "user") != digest("user", "user")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "repaet"}, "data.task=repaet.*nearest is repeat"),
        ({"path": "p.jsonl", "reasoning_gym": "chain_sum"}, "exclude each other"),
        ({"eval_path": "p.jsonl"}, "goes with data.path"),
        ({"max_prompt_length": 0}, "max_prompt_length"),
    ],
)
def test_bad_settings(tokenizer, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_prompts(settings_with(**changes), tokenizer, seed=1)


@pytest.mark.parametrize("template", ["{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ none.upper() }}", "{%"])
def test_a_chat_template_that_fails(tokenizer, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ConfigError, match="repeat prompt 0: refused by the chat template: "):
        load_prompts(settings_with(), tokenizer, seed=1)


def test_more_held_out_prompts_than_lines(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(ConfigError, match="has only 2 prompts"):
        load_prompts(settings_with(path=path, eval_size=2), tokenizer, seed=1)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return load_prompts(settings_with(), tokenizer, seed=1).train


@settings(deadline=None, max_examples=40)
@given(
    batch_size=st.integers(1, 70),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    before=st.integers(0, 5),
)
def test_resuming_gives_the_batches_that_would_have_come(
    prompts, batch_size, seed, shuffle, before
):
    loader = PromptLoader(prompts, batch_size, shuffle=shuffle, seed=seed)
    for _ in range(before):
        loader.next_batch()
    resumed = PromptLoader(prompts, batch_size, shuffle=shuffle, seed=seed)
    resumed.load_state(json.loads(json.dumps(loader.state())))
    for _ in range(3):
        assert resumed.next_batch() == loader.next_batch()


@settings(deadline=None, max_examples=20)
@given(batch_size=st.integers(1, 70), seed=st.integers(0, 5))
def test_every_epoch_visits_every_prompt_once(prompts, batch_size, seed):
    loader = PromptLoader(prompts, batch_size, shuffle=True, seed=seed)
    indices = [prompt.index for _ in range(-(-96 // batch_size)) for prompt in loader.next_batch()]
    epochs = [indices[start : start + 32] for start in (0, 32, 64)]
    assert all(sorted(epoch) == list(range(32)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_without_shuffling_the_order_is_that_of_the_data(prompts):
    loader = PromptLoader(prompts, 16, shuffle=False, seed=1)
    indices = [prompt.index for _ in range(4) for prompt in loader.next_batch()]
    assert indices == [*range(32), *range(32)]


@pytest.mark.parametrize("change", [{"seed": 2}, {"shuffle": False}])
def test_a_position_of_another_order_is_refused(prompts, change):
    state = PromptLoader(prompts, 4, shuffle=True, seed=1).state()
    other = PromptLoader(prompts, 4, **{"shuffle": True, "seed": 1, **change})
    with pytest.raises(ConfigError, match=next(iter(change))):
        other.load_state(state)
