"""The default task."""

from hypothesis import given
from hypothesis import strategies as st

from minirl.repeat_task import (
    DIGITS,
    LENGTH,
    VERBS,
    held_out_prompts,
    reward,
    reward_of,
    train_prompts,
)


def test_the_split_keeps_every_verb_and_digit_in_training():
    train, held_out = train_prompts(), held_out_prompts()
    assert (len(train), len(held_out)) == (32, 8)
    assert set(train).isdisjoint(held_out)
    assert {text.split()[0] for text in train} == set(VERBS)
    assert {text[-2] for text in train} == set(DIGITS)
    assert len({*train, *held_out}) == len(VERBS) * len(DIGITS)


@given(st.text(max_size=20), st.sampled_from(train_prompts()))
def test_the_reward_is_the_share_of_the_right_digit(completion, prompt):
    value = reward_of(prompt, completion)
    hits = sum(character == prompt[-2] for character in completion[:LENGTH])
    assert value == hits / LENGTH


def test_missing_characters_are_misses_and_later_ones_do_not_count():
    assert reward_of("say 7:", "777") == 3 / 8
    assert reward_of("say 7:", "7" * 8) == 1.0
    assert reward_of("say 7:", "1" * 8 + "7" * 8) == 0.0


@given(st.text(st.characters(codec="ascii"), max_size=12))
def test_no_constant_answer_gets_more_than_a_tenth(answer):
    prompts = [f"{verb} {digit}:" for verb in VERBS for digit in DIGITS]
    assert sum(reward(prompts, [answer] * len(prompts))) / len(prompts) <= 0.1 + 1e-9
