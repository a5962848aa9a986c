"""The ranks of an engine answer together, in order, or not at all."""

import pytest

from rl_core.errors import RolloutError
from rl_core.rollout.live_ranks import split_of, together


def rank(number, **changed):
    return {
        "rank": number,
        "device": "cpu",
        "settings": {"dtype": "float32"},
        "split": {},
        "digests": {"w": f"wsum64:{number:016x}"},
        **changed,
    }


def test_the_answers_are_put_in_rank_order():
    live = together("vllm", [rank(1), rank(0)])
    assert (live.engine, live.device, live.settings) == ("vllm", "cpu", {"dtype": "float32"})
    assert [held["w"][-1] for held in live.ranks] == ["0", "1"]


@pytest.mark.parametrize(
    "answers",
    [
        [],
        None,
        ["no mapping"],
        [rank(0), rank(1, settings={"dtype": "bfloat16"})],
        [rank(0), rank(1, split={"pipeline_parallel_size": 2})],
        [rank(0, more=1)],
        [rank(0, digests={"w": 5})],
    ],
)
def test_what_belongs_to_no_one_engine_is_refused(answers):
    with pytest.raises(RolloutError):
        together("vllm", answers)


def test_only_what_is_spread_is_a_split():
    assert split_of(pipeline_parallel_size=1, data_parallel_size=2) == {"data_parallel_size": 2}
