"""Whoever started a vLLM: what it holds is asked for, or it is said what it lacks."""

from functools import partial

import pytest

from rl_core.errors import RolloutError
from rl_core.interfaces import LiveWeights
from rl_core.rollout.live_route import PATH
from rl_core.testing.answering_server import asked, rank_answer
from rl_rollout_vllm.probe import probe

VERSION = {"GET /version": (200, {"version": "0.32.0"})}
RPC = "POST /collective_rpc"
HELD = LiveWeights("vllm", "cpu", {"dtype": "float32"}, [{"w": "wsum64:00"}, {"w": "wsum64:01"}])


probed = partial(asked, probe)


def test_the_route_is_asked_where_there_is_one():
    content = {"engine": "vllm", "device": "cpu", "settings": HELD.settings, "ranks": HELD.ranks}
    found, asked = probed({**VERSION, f"GET {PATH}": (200, content)})
    assert found == HELD
    assert (RPC, {"method": "rl_live_weights"}) not in asked


def test_else_the_development_mode_is_asked():
    results = {"results": [rank_answer(1), rank_answer(0)]}
    found, asked = probed({**VERSION, RPC: (200, results)})
    assert found == HELD
    assert asked[-1] == (RPC, {"method": "rl_live_weights"})


@pytest.mark.parametrize("answer", [(404, {}), (200, {"release": "1"}), (200, b"0.32.0"), (500, 1)])
def test_another_kind_of_server_is_none(answer):
    found, asked = probed({"GET /version": answer})
    assert found is None
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, {"detail": "Not Found"}), "start it with --worker-extension-cls rl_rollout_vllm"),
        ((500, {"error": {"message": "no attribute"}}), "no attribute.*--worker-extension-cls"),
        ((200, {"results": [None]}), "not what the ranks"),
        ((200, {}), "0 ranks"),
        ((200, [1]), "--worker-extension-cls"),
    ],
)
def test_a_vllm_that_cannot_tell_is_an_error_that_says_what_it_lacks(answer, words):
    with pytest.raises(RolloutError, match=words):
        probed({**VERSION, RPC: answer})
