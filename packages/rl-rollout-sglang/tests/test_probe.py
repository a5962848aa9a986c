"""Whoever started an SGLang: what it holds is asked for, or it is said what it lacks."""

import json
from functools import partial
from types import SimpleNamespace

import pytest

from rl_core.errors import RolloutError
from rl_core.interfaces import LiveWeights
from rl_core.rollout.live_route import PATH
from rl_core.testing.answering_server import asked, rank_answer
from rl_rollout_sglang.live_plugin import ACTION, check_weights
from rl_rollout_sglang.probe import probe

MODEL = {"GET /model_info": (200, {"model_path": "/models/a"})}
CHECKER = "POST /weights_checker"
HELD = LiveWeights("sglang", "cpu", {"dtype": "float32"}, [{"w": "wsum64:00"}, {"w": "wsum64:01"}])


probed = partial(asked, probe)


def test_the_route_is_asked_where_there_is_one():
    content = {"engine": "sglang", "device": "cpu", "settings": HELD.settings, "ranks": HELD.ranks}
    found, asked = probed({**MODEL, f"GET {PATH}": (200, content)})
    assert found == HELD
    assert asked[-1][0] == f"GET {PATH}"


def test_else_the_plugins_action_is_asked():
    message = json.dumps([rank_answer(1), rank_answer(0)])
    found, asked = probed({**MODEL, CHECKER: (200, {"success": True, "message": message})})
    assert found == HELD
    assert asked[-1] == (CHECKER, {"action": ACTION})


@pytest.mark.parametrize("answer", [(404, {}), (200, {"model": "a"}), (200, b"<html>")])
def test_another_kind_of_server_is_none(answer):
    found, asked = probed({"GET /model_info": answer})
    assert found is None
    assert len(asked) == 1


UNKNOWN = {"success": False, "message": f"Unsupported action='{ACTION}'"}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, UNKNOWN), "install rl-rollout-sglang where it runs"),
        ((404, {"detail": "Not Found"}), "install rl-rollout-sglang where it runs"),
        ((400, {"success": False, "message": "'w' has no memory"}), "'w' has no memory"),
        ((401, {"error": "Unauthorized"}), "Unauthorized"),
        ((200, {"success": True, "message": "[] | []"}), "more than one engine"),
        ((200, {"success": True, "message": "[]"}), "0 ranks"),
        ((200, {"success": True}), "none"),
    ],
)
def test_an_sglang_that_cannot_tell_is_an_error_that_says_what_it_lacks(answer, words):
    with pytest.raises(RolloutError, match=words):
        probed({**MODEL, CHECKER: answer})


def test_the_plugin_leaves_sglangs_actions_alone():
    def original(manager, request):
        return manager, request.action

    request = SimpleNamespace(action="checksum")
    assert check_weights(original, "manager", request) == ("manager", "checksum")
