"""The engine schedules only while nobody holds it; who waits is told when he waits in vain."""

import asyncio

import pytest

from rl_core.errors import LifecycleError, RolloutError, TransferTimeoutError
from rl_core.gate import ServingGate
from rl_core.interfaces import PauseMode
from rl_core.publish import Begin, Commit, Failed, Received, Verified
from rl_core.rollout.pauses import Pauses
from rl_core.versions import PolicyVersion

KEEPING = [mode for mode in PauseMode if mode.keeps]


class Engine:
    """One that has requests or not, and ends them when it is told to."""

    def __init__(self):
        self.paused = None
        self.busy = True
        self.fails = self.fails_late = False

    async def pause(self, mode):
        if self.fails:
            raise RolloutError("no such mode")
        self.paused = mode
        if self.fails_late:
            raise RolloutError("it did not confirm")
        if mode is PauseMode.ABORT:
            self.busy = False
        while mode is PauseMode.WAIT and self.busy:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def resume(self):
        self.paused = None


def check(scenario):
    """Run a scenario with an engine, its pauses, and the gate in front."""

    async def run():
        gate, version = ServingGate("replica"), PolicyVersion(1, 0)
        for event in (Begin(version), Received(version), Verified(version), Commit(version)):
            gate.apply(event)
        engine = Engine()
        await asyncio.wait_for(scenario(engine, Pauses(engine, gate), gate), 20)

    asyncio.run(run())


@pytest.mark.parametrize("mode", KEEPING)
def test_what_is_kept_is_not_waited_for(mode):
    async def scenario(engine, pauses, gate):
        await pauses.pause(mode, 5)
        with pytest.raises(LifecycleError, match=f"pause.{mode}. keeps requests until continue_"):
            await pauses.pause(PauseMode.WAIT, 5)
        assert engine.paused is mode
        await pauses.continue_()
        engine.busy = False
        await pauses.pause(PauseMode.WAIT, 5)

    check(scenario)


@pytest.mark.parametrize("by", ["update", "user before the update"])
def test_nor_is_what_an_update_keeps(by):
    async def scenario(engine, pauses, gate):
        if by != "update":
            await pauses.pause(PauseMode.KEEP, 5)
        await pauses.begin_update(PauseMode.KEEP, 5)
        await pauses.continue_()
        with pytest.raises(LifecycleError, match="until it is committed"):
            await pauses.pause(PauseMode.WAIT, 5)
        assert engine.paused is PauseMode.KEEP
        await pauses.end_update()
        assert engine.paused is None

    check(scenario)


def test_a_pause_that_waits_in_vain_holds_nothing():
    async def scenario(engine, pauses, gate):
        with pytest.raises(TransferTimeoutError, match="not paused"):
            await pauses.pause(PauseMode.WAIT, 0.02)
        assert engine.paused is None
        engine.busy = False
        await asyncio.sleep(0.02)
        await pauses.begin_update(PauseMode.ABORT, 5)
        assert engine.paused is PauseMode.ABORT

    check(scenario)


def test_a_pause_that_fails_leaves_an_earlier_one():
    async def scenario(engine, pauses, gate):
        await pauses.pause(PauseMode.KEEP, 5)
        engine.fails = True
        with pytest.raises(RolloutError, match="no such mode"):
            await pauses.pause(PauseMode.IN_PLACE, 5)
        engine.fails = False
        await pauses.begin_update(PauseMode.ABORT, 5)
        await pauses.end_update()
        assert engine.paused is PauseMode.KEEP

    check(scenario)


def test_a_pause_that_fails_when_the_engine_has_stopped_lets_it_go_on():
    async def scenario(engine, pauses, gate):
        engine.fails_late = True
        with pytest.raises(RolloutError, match="did not confirm"):
            await pauses.pause(PauseMode.ABORT, 5)
        assert engine.paused is None

    check(scenario)


@pytest.mark.parametrize("by", ["continue_", "pause"])
def test_a_pause_that_waits_is_overtaken(by):
    """Were it to come later, an update would find an engine that runs and is held to be paused."""

    async def scenario(engine, pauses, gate):
        waiting = asyncio.create_task(pauses.pause(PauseMode.WAIT, 5))
        await asyncio.sleep(0.01)
        await (pauses.continue_() if by == "continue_" else pauses.pause(PauseMode.KEEP, 5))
        with pytest.raises(LifecycleError, match="overtaken"):
            await waiting
        engine.busy = False
        await asyncio.sleep(0.01)
        await pauses.begin_update(PauseMode.ABORT, 5)
        assert engine.paused is (PauseMode.ABORT if by == "continue_" else PauseMode.KEEP)

    check(scenario)


def test_an_update_lets_a_pause_have_what_it_waits_for():
    async def scenario(engine, pauses, gate):
        waiting = asyncio.create_task(pauses.pause(PauseMode.WAIT, 5))
        await asyncio.sleep(0.01)
        with pytest.raises(TransferTimeoutError, match="before the update"):
            await pauses.begin_update(PauseMode.KEEP, 0.02)
        beginning = asyncio.create_task(pauses.begin_update(PauseMode.KEEP, 5))
        await asyncio.sleep(0.01)
        assert not beginning.done()
        engine.busy = False
        await asyncio.gather(waiting, beginning)
        await pauses.end_update()
        assert engine.paused is PauseMode.WAIT  # until the user lets go

    check(scenario)


def test_requests_that_come_late_are_aborted_too():
    """Those that the gate had let in, and that were not in the engine at the first abort."""

    async def scenario(engine, pauses, gate):
        async def late():
            with gate.admit():
                await asyncio.sleep(0.05)
                engine.busy = True
                while engine.busy:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

        request = asyncio.create_task(late())
        await asyncio.sleep(0.01)
        gate.apply(Failed("it fails"))
        await pauses.end_requests()
        await asyncio.wait_for(request, 0.1)
        assert gate.in_flight == 0

    check(scenario)


def test_after_a_failed_update_that_met_no_request_nothing_is_kept():
    async def scenario(engine, pauses, gate):
        engine.busy = False
        await pauses.begin_update(PauseMode.KEEP, 5)
        gate.apply(Failed("it fails"))
        await pauses.end_requests()
        await pauses.pause(PauseMode.WAIT, 5)
        assert engine.paused is PauseMode.WAIT

    check(scenario)


def test_after_an_abort_nothing_is_kept():
    async def scenario(engine, pauses, gate):
        await pauses.pause(PauseMode.KEEP, 5)
        await pauses.abort()
        await pauses.pause(PauseMode.WAIT, 5)

    check(scenario)
