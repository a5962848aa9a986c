"""The path on which a server tells what its engine holds only reads, and answers one at a time."""

import asyncio
import json

import msgspec
import pytest

from rl_core.errors import LifecycleError
from rl_core.interfaces import LiveWeights
from rl_core.rollout.live_route import PATH, LiveRoute

HELD = LiveWeights("vllm", "cpu", {"dtype": "float32"}, [{"w": "wsum64:01"}], {})


def answer(look, path=PATH, method="GET", kind="http", count=1):
    """Status and content of one answer of many at once, or `passed`."""
    sent = []

    async def app(scope, receive, send):
        sent.append("passed")

    async def send(message):
        sent.append(message)

    async def all_at_once():
        route = LiveRoute(app, look)
        scope = {"type": kind, "path": path, "method": method}
        await asyncio.gather(*(route(scope, None, send) for _ in range(count)))

    asyncio.run(all_at_once())
    if sent == ["passed"]:
        return "passed"
    return sent[0]["status"], json.loads(sent[-1]["body"])


async def look(scope):
    return HELD


def test_what_the_engine_holds_is_told():
    status, content = answer(look)
    assert status == 200
    assert msgspec.convert(content, LiveWeights) == HELD


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_can_only_be_read(method):
    async def never(scope):
        raise AssertionError("it was looked at")

    status, content = answer(never, method=method)
    assert status == 405
    assert "can only be read" in content["error"]["message"]


@pytest.mark.parametrize(("path", "kind"), [("/v1/models", "http"), (PATH, "websocket")])
def test_everything_else_is_handed_on(path, kind):
    assert answer(look, path, kind=kind) == "passed"


def test_an_engine_that_cannot_tell_says_why():
    async def released(scope):
        raise LifecycleError("the weights are released")

    assert answer(released) == (503, {"error": {"message": "the weights are released"}})


def test_many_who_ask_at_once_are_answered_one_by_one():
    looking = []

    async def slow(scope):
        looking.append("begin")
        await asyncio.sleep(0)
        looking.append("end")
        return HELD

    answer(slow, count=3)
    assert looking == ["begin", "end"] * 3
