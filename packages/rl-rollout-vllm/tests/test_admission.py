"""Who comes together is queued together; the scheduler is let go whatever happens meanwhile."""

import asyncio

import pytest

from rl_core.errors import RolloutError
from rl_rollout_vllm import admission
from rl_rollout_vllm.admission import Admission


class Scheduler:
    """Notes what is done to it, in order; each answer takes a while."""

    def __init__(self):
        self.told = []
        self.failure = None
        self.holding = asyncio.Event()
        self.admission = Admission(self.hold, self.release)

    async def hold(self):
        self.told.append("hold")
        self.holding.set()
        await asyncio.sleep(0.05)
        if self.failure is not None:
            raise self.failure

    async def release(self):
        self.told.append("release")
        await asyncio.sleep(0.01)

    async def enter(self, name, error=None):
        async with self.admission.entering():
            if error is not None:
                raise error
            self.told.append(name)
            await asyncio.sleep(0)

    async def settled(self):
        await self.admission.close()
        self.admission.reopen()
        return self.told


def test_what_comes_together_is_queued_in_order_under_one_hold():
    async def run():
        scheduler = Scheduler()
        await asyncio.gather(*map(scheduler.enter, "abcd"))
        assert await scheduler.settled() == ["hold", *"abcd", "release"]

    asyncio.run(run())


def test_one_that_comes_alone_holds_nothing():
    async def run():
        scheduler = Scheduler()
        await scheduler.enter("a")
        await scheduler.enter("b")
        assert await scheduler.settled() == ["a", "b"]

    asyncio.run(run())


def test_the_last_of_two_batches_lets_go():
    async def run():
        scheduler = Scheduler()
        first = asyncio.gather(*map(scheduler.enter, "ab"))
        await scheduler.holding.wait()
        await asyncio.gather(first, *map(scheduler.enter, "cd"))
        assert await scheduler.settled() == ["hold", "hold", *"abcd", "release"]

    asyncio.run(run())


def test_batches_without_end_do_not_hold_it_for_ever(monkeypatch):
    monkeypatch.setattr(admission, "LONGEST_S", 0.2)

    async def run():
        scheduler = Scheduler()
        batches = set()
        while "release" not in scheduler.told:  # each comes before the last one is in
            batches.add(asyncio.gather(*map(scheduler.enter, "ab")))
            await asyncio.sleep(0.02)
        await asyncio.gather(*batches)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_refused_and_cancelled_requests_do_not_keep_the_others():
    async def run():
        scheduler = Scheduler()
        tasks = [
            asyncio.create_task(scheduler.enter(name, error))
            for name, error in [("a", None), ("b", KeyError("refused")), ("c", None), ("d", None)]
        ]
        await scheduler.holding.wait()
        tasks[2].cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [
            type(None),
            KeyError,
            asyncio.CancelledError,
            type(None),
        ]
        assert await scheduler.settled() == ["hold", "a", "d", "release"]

    asyncio.run(run())


def test_cancelled_requests_alone_let_go():
    async def run():
        scheduler = Scheduler()
        tasks = [asyncio.create_task(scheduler.enter(name)) for name in "ab"]
        await scheduler.holding.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert await scheduler.settled() == ["hold", "release"]

    asyncio.run(run())


def test_a_scheduler_that_cannot_be_held_is_an_error_of_the_batch():
    async def run():
        scheduler = Scheduler()
        scheduler.failure = RolloutError("the engine died")
        ends = await asyncio.gather(*map(scheduler.enter, "ab"), return_exceptions=True)
        assert [str(end) for end in ends] == ["the engine died"] * 2
        scheduler.failure = None
        await asyncio.gather(*map(scheduler.enter, "cd"))
        held = ["hold", "release", "hold", "c", "d", "release"]
        assert await scheduler.settled() == held

    asyncio.run(run())


def test_nothing_is_held_or_let_go_while_somebody_else_holds():
    async def run():
        scheduler = Scheduler()
        batch = asyncio.gather(*map(scheduler.enter, "ab"))
        await scheduler.holding.wait()
        await asyncio.wait_for(scheduler.admission.close(), 5)
        assert scheduler.told == ["hold", "a", "b", "release"]
        await batch
        await asyncio.gather(*map(scheduler.enter, "cd"))
        assert scheduler.told[4:] == ["c", "d"]
        scheduler.admission.reopen()
        await asyncio.gather(*map(scheduler.enter, "ef"))
        assert (await scheduler.settled())[6:] == ["hold", "e", "f", "release"]

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 2])
def test_closing_waits_until_what_came_before_is_queued(count):
    """So that an abort finds it."""

    async def run():
        scheduler = Scheduler()
        tasks = [asyncio.create_task(scheduler.enter(name)) for name in "ab"[:count]]
        await asyncio.sleep(0)
        await scheduler.admission.close()
        scheduler.told.append("pause")
        await asyncio.gather(*tasks)
        assert scheduler.told[-1] == "pause"
        assert "a" in scheduler.told

    asyncio.run(run())
