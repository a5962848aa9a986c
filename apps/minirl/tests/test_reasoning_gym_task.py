"""Problems of reasoning-gym: sources, splits and scores."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirl.reasoning_gym_task import (
    Problems,
    _registry,
    last_number,
    make_reward,
    tagged,
    untagged,
)
from rl_core.errors import ComponentNotFoundError, ConfigError

SUMS = {"name": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(max_size=5), inner)
    ),
)


@given(plain_values)
def test_marking_tuples_is_undone_exactly(value):
    back = untagged(tagged(value))
    assert back == value
    assert repr(back) == repr(value)


def test_train_and_held_out_questions_are_disjoint_and_held_out_ones_differ():
    train, held_out = Problems.from_config({**SUMS, "size": 300}, seed=1).split(256)
    assert (len(train), len(held_out)) == (300, 256)
    assert len({item.text for item in held_out}) == 256
    assert {item.text for item in train}.isdisjoint(item.text for item in held_out)


def test_the_seed_decides_the_problems():
    first, same, other = (
        [item.text for item in Problems.from_config(SUMS, seed).split(4)[0]] for seed in (1, 1, 2)
    )
    assert first == same != other
    own = [item.text for item in Problems.from_config({**SUMS, "seed": 2}, 1).split(4)[0]]
    assert own == other


def test_the_held_out_set_does_not_depend_on_the_training_size():
    small, large = (Problems.from_config({**SUMS, "size": n}, 1).split(16)[1] for n in (10, 100))
    assert [item.text for item in small] == [item.text for item in large]


def test_an_options_space_that_is_too_small_is_an_error():
    with pytest.raises(ConfigError, match="too few different questions"):
        Problems.from_config({**SUMS, "max_digits": 1}, seed=1).split(250)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("chain_sums", "no data set named 'chain_sums'; the nearest is 'chain_sum'"),
        ({"min_terms": 2}, "a mapping with a key name"),
        ({**SUMS, "min_termz": 2}, "unknown key .*min_termz.*min_terms"),
        ({**SUMS, "min_terms": "two"}, "min_terms"),
        ({**SUMS, "min_terms": 9}, "max_terms must be >= min_terms"),
        ({**SUMS, "size": 0}, "size must be a positive integer"),
        ({**SUMS, "extract": "first"}, "extract=first is none of whole, last_number"),
    ],
)
def test_bad_settings(value, message):
    with pytest.raises(ConfigError, match=message):
        Problems.from_config(value, seed=1)


@pytest.mark.parametrize("name", ["chain_sum", "arc_1d", "arc_agi", "countdown", "knights_knaves"])
def test_the_oracles_answer_is_right_and_another_is_not(name):
    train, _ = Problems.from_config({"name": name, "size": 3}, seed=1).split(0)
    reward = make_reward(name, {})
    entries = [tagged(item.columns["entry"]) for item in train]
    right = [f" {item.columns['answer']}\n" for item in train]
    assert reward(right, entry=entries) == [1.0] * 3
    assert all(value < 1.0 for value in reward(["no idea"] * 3, entry=entries))


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("3 + 4 = 7.", "7"),
        ("it is -12, I think", "-12"),
        ("1,234.50 or so", "1,234.50"),
        ("seven", ""),
        ("7, 8, ", "8"),
    ],
)
def test_the_last_number_can_be_what_counts(completion, number):
    assert last_number(completion) == number


def test_extraction_is_part_of_the_reward():
    train, _ = Problems.from_config({**SUMS, "size": 1}, seed=1).split(0)
    columns = train[0].columns
    text = f"{columns['entry']['metadata']['expression']} = {columns['answer']}."
    assert make_reward("chain_sum", {})([text], entry=[columns["entry"]])[0] < 0.5
    reward = make_reward("chain_sum", {}, extract="last_number")
    assert reward([text, "none"], entry=[columns["entry"]] * 2) == [1.0, 0.0]


def test_an_answer_that_breaks_the_scorer_gets_nothing():
    train, _ = Problems.from_config({"name": "prime_factorization", "size": 1}, 1).split(0)
    assert make_reward("prime_factorization", {})(["x"], entry=[train[0].columns["entry"]]) == [0.0]


def test_a_question_of_ones_own_is_filled_from_the_metadata():
    value = {
        "name": "chain_sum",
        "min_terms": 2,
        "max_terms": 2,
        "question": "What is {expression}?",
    }
    train, _ = Problems.from_config({**value, "size": 5}, seed=1).split(0)
    for prompt in train:
        expression = prompt.columns["entry"]["metadata"]["expression"]
        assert prompt.text == f"What is {expression}?"


@pytest.mark.parametrize("question", ["What is {sum}?", "What is {", 7])
def test_a_question_that_cannot_be_filled_is_refused(question):
    with pytest.raises(ConfigError, match="question"):
        Problems.from_config({"name": "chain_sum", "question": question}, seed=1)


def test_without_the_library_it_says_what_to_install(monkeypatch):
    _registry.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ComponentNotFoundError, match=r"pip install 'rl-minirl\[reasoning-gym\]'"):
        Problems.from_config("chain_sum", seed=1)
