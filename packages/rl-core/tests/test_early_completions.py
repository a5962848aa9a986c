"""What a server keeps of its calls: for whom, and until when."""

import asyncio
import functools

import pytest

from rl_core.rollout.early_completions import EarlyCompletions
from rl_core.trajectory import Completion, GenerateRequest, SamplingParams

LIMIT_S = 10.0


def requests(*names):
    return [GenerateRequest(name, [1], SamplingParams()) for name in names]


def done(name):
    return Completion(name, [1], [-1.0], "stop", [])


def in_a_loop(test):
    """Run an async test."""

    @functools.wraps(test)
    def run(**arguments):
        asyncio.run(test(**arguments))

    return run


async def asking(early, *names, wait=LIMIT_S):
    """A question that has been put."""
    task = asyncio.create_task(early.finished(names, wait))
    await asyncio.sleep(0)
    return task


@in_a_loop
async def test_whoever_waits_is_told_of_the_first_and_then_of_all_that_he_asks_for():
    early = EarlyCompletions()
    with early.opened(requests("a", "b", "c")) as ended, early.opened(requests("d")) as other:
        question = await asking(early, "a", "b", "d")
        ended(done("c"))
        await asyncio.sleep(0)
        assert not question.done()
        ended(done("b"))
        assert await question == [done("b")]
        other(done("d"))
        assert await early.finished(["a", "b", "d"], 0) == [done("b"), done("d")]
        assert await early.finished(["a"], 0.01) == []


@pytest.mark.parametrize("error", [None, RuntimeError("the engine failed")])
@in_a_loop
async def test_the_end_of_the_call_ends_every_wait_and_leaves_nothing(error):
    early = EarlyCompletions()
    try:
        with early.opened(requests("a", "b")) as ended:
            ended(done("a"))
            question = await asking(early, "b")
            if error is not None:
                raise error
    except RuntimeError:
        pass
    assert await question == []
    assert await early.finished(["a", "b"], LIMIT_S) == []
    assert early._calls == []


@in_a_loop
async def test_a_call_that_is_open_keeps_its_own_when_another_ends():
    early = EarlyCompletions()
    with early.opened(requests("a")) as ended:
        with early.opened(requests("b")) as other:
            other(done("b"))
            question = await asking(early, "a")
        await asyncio.sleep(0)
        assert not question.done()
        ended(done("a"))
        assert await question == [done("a")]
