"""Who waits for a pause to end is known, so that a pause need not wait for them."""

import asyncio

import pytest

from rl_rollout_sglang.pause_condition import REQUESTS, EndedWaitError, PauseCondition


def test_what_waits_is_held_until_it_goes_on_or_is_ended():
    async def scenario():
        condition, paused = PauseCondition(), [True]

        async def ask(*requests):
            REQUESTS.set(requests)
            async with condition:
                return await condition.wait_for(lambda: not paused[0])

        batch, single = asyncio.create_task(ask("a#0", "a#1")), asyncio.create_task(ask("b"))
        await asyncio.sleep(0)
        assert condition.holds({"a#0", "a#1", "b"})
        assert not condition.holds({"b", "c"})
        await condition.end_waiting()
        for ended in (batch, single):
            with pytest.raises(EndedWaitError):
                await ended
        assert not condition.holds({"b"})
        late = asyncio.create_task(ask("c"))
        await asyncio.sleep(0)
        assert condition.holds({"c"})
        paused[0] = False
        async with condition:
            condition.notify_all()
        assert await late
        assert not condition.holds({"c"})

    asyncio.run(scenario())
