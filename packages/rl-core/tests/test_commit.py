"""A commit flushes, stamps and lets in; one that is late, doubled or foreign touches nothing."""

import asyncio
from typing import ClassVar

import pytest

from rl_core.errors import LifecycleError, RolloutError, StaleVersionError
from rl_core.gate import ServingGate
from rl_core.publish import Begin, Commit, Failed, Outdated, Phase, Received, Verified
from rl_core.rollout.adapter import StreamingAdapter
from rl_core.rollout.config import EngineConfig
from rl_core.rollout.engine_memory import EngineMemory
from rl_core.rollout.pauses import Pauses
from rl_core.rollout.weight_updates import WeightUpdates
from rl_core.versions import PolicyVersion

V1, V2, V3 = (PolicyVersion(1, step) for step in (1, 2, 3))
WHOLE = ["flush", "zero", "e1.s2", "resume"]
"""What a commit of V2 asks of the engine."""


class Engine:
    """Notes what it is asked; something may happen at each step."""

    def __init__(self):
        self.asked = []
        self.happens = {}

    async def _do(self, what):
        self.asked.append(what)
        self.happens.get(what, lambda: None)()
        await asyncio.sleep(0)

    async def clear_kv_cache(self):
        await self._do("flush")

    async def zero_kv_cache(self):
        await self._do("zero")

    async def set_version(self, version):
        await self._do(version)

    async def resume(self):
        await self._do("resume")


def commits(scenario, *events):
    """Run a scenario in which V1 was served, and then these events happened."""

    async def run():
        engine, gate = Engine(), ServingGate("replica")
        for event in (Begin(V1), Received(V1), Verified(V1), Commit(V1), *events):
            gate.apply(event)
        memory = EngineMemory(engine, enabled=True)
        updates = WeightUpdates(engine, gate, Pauses(engine, gate), memory, True)
        await asyncio.wait_for(scenario(engine, gate, updates), 20)

    asyncio.run(run())


def test_what_was_loaded_is_flushed_stamped_and_let_in():
    async def scenario(engine, gate, updates):
        await updates.commit(V2)
        assert engine.asked == WHOLE
        assert (gate.state.phase, gate.state.committed) == (Phase.COMMITTED, V2)

    commits(scenario, Begin(V2), Received(V2))


@pytest.mark.parametrize("version", [V1, V2, V3], ids=str)
@pytest.mark.parametrize(
    "events",
    [
        (),
        (Begin(V2), Received(V2), Verified(V2), Commit(V2)),
        (Outdated(),),
        (Begin(V2),),
        (Begin(V2), Failed("it was fenced")),
    ],
    ids=["serving", "serving the next", "stale", "receiving", "fenced"],
)
def test_what_comes_late_or_twice_does_not_touch_the_engine(events, version):
    """Tokens under way would be stamped with another version, and lose their KV."""

    async def scenario(engine, gate, updates):
        before = gate.state
        with pytest.raises((LifecycleError, StaleVersionError)):
            await updates.commit(version)
        assert engine.asked == []
        assert gate.state == before

    commits(scenario, *events)


def test_one_of_an_attempt_that_failed_does_not_commit_the_next():
    """It holds the same version, and nobody has verified it."""

    async def scenario(engine, gate, updates):
        with pytest.raises(StaleVersionError, match="belongs to attempt 2, under way is 3"):
            await updates.commit(V2, 2)
        assert engine.asked == []
        assert gate.state.phase is Phase.LOADED
        await updates.commit(V2, 3)
        assert engine.asked == WHOLE

    again = Begin(V2), Received(V2)
    commits(scenario, *again, Failed("the commit timed out"), *again)


def test_the_adapters_message_carries_the_attempt(tmp_path):
    class Server:
        calls: ClassVar = []

        def call(self, method, *args, timeout):
            self.calls.append((method, *args))
            return 7 if method == "attempt" else None

    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig(local_path=str(tmp_path))
    StreamingAdapter(Server(), 0, config).commit(V2, 5.0)
    assert Server.calls == [("attempt",), ("commit", V2, 7)]


@pytest.mark.parametrize("moment", ["flush", "zero"])
def test_a_commit_that_is_overtaken_stamps_nothing(moment):
    """Fenced while its flush hung, and V3 loaded since."""

    async def scenario(engine, gate, updates):
        def overtaken():
            for event in (Failed("the commit timed out"), Begin(V3), Received(V3)):
                gate.apply(event)

        engine.happens[moment] = overtaken
        with pytest.raises((LifecycleError, StaleVersionError)):
            await updates.commit(V2)
        assert "e1.s2" not in engine.asked
        engine.happens.clear()
        await updates.commit(V3)
        assert gate.state.committed == V3

    commits(scenario, Begin(V2), Received(V2))


def test_a_flush_that_is_not_confirmed_fences():
    async def scenario(engine, gate, updates):
        def refuses():
            raise RolloutError("not confirmed")

        engine.happens["flush"] = refuses
        with pytest.raises(RolloutError, match="not confirmed"):
            await updates.commit(V2)
        assert gate.state.phase is Phase.FENCED
        assert engine.asked == ["flush"]

    commits(scenario, Begin(V2), Received(V2))
