"""The ranks of a replica are updated together, once, or not at all."""

import asyncio

import pytest

from rl_core.errors import (
    LifecycleError,
    ManifestMismatchError,
    StaleVersionError,
    TransferError,
    TransferTimeoutError,
)
from rl_core.interfaces import LoadReport
from rl_core.metadata import Manifest, TensorMeta
from rl_core.rollout.protocol import Offer
from rl_core.rollout.update_rendezvous import Rendezvous
from rl_core.versions import PolicyVersion

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def offer(rank, version=V1, shape=(2,), seconds=5.0):
    manifest = Manifest(version, (TensorMeta("w", shape, "float32"),))
    return Offer(rank, f"unix:{rank}", b"k" * 32, manifest, seconds)


class Engine:
    def __init__(self, error=None, seconds=0.0):
        self.calls = []
        self._error = error
        self._seconds = seconds

    async def run(self, offers):
        self.calls.append([item.tp_rank for item in offers])
        await asyncio.sleep(self._seconds)
        if self._error:
            raise self._error
        return [LoadReport(V1, item.tp_rank, 0) for item in offers]


async def join_all(engine, offers):
    update = Rendezvous(offers[0], 2, engine.run)
    return await asyncio.gather(*(update.join(item) for item in offers), return_exceptions=True)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_all_ranks_are_loaded_by_one_call_and_each_gets_its_own_report(order):
    engine = Engine()
    reports = asyncio.run(join_all(engine, [offer(rank) for rank in order]))
    assert engine.calls == [[0, 1]]
    assert [report.tensors for report in reports] == list(order)


def test_a_failure_reaches_every_rank():
    error = TransferError("worker 1 lost its stream")
    outcomes = asyncio.run(join_all(Engine(error), [offer(0), offer(1)]))
    assert outcomes == [error, error]


def test_a_rank_that_never_comes_is_named():
    async def alone():
        await Rendezvous(offer(0, seconds=0.1), 2, Engine().run).join(offer(0, seconds=0.1))

    with pytest.raises(TransferTimeoutError, match=r"ranks \[1\]"):
        asyncio.run(alone())


def test_an_engine_that_is_too_slow_is_named_and_its_late_result_is_dropped():
    async def late():
        engine = Engine(seconds=0.3)
        update = Rendezvous(offer(0), 1, engine.run)
        waiting = asyncio.create_task(update.join(offer(0, seconds=0.1)))
        with pytest.raises(TransferTimeoutError):
            await asyncio.wait_for(asyncio.shield(update._outcome(0.05)), 1)
        with pytest.raises(TransferTimeoutError):
            await waiting

    asyncio.run(late())


def test_a_second_sender_another_version_and_a_foreign_rank_are_refused():
    async def strangers():
        update = Rendezvous(offer(0), 2, Engine().run)
        waiting = asyncio.create_task(update.join(offer(0)))
        await asyncio.sleep(0)
        with pytest.raises(StaleVersionError, match="already sends"):
            await update.join(offer(0))
        with pytest.raises(StaleVersionError, match=r"e1\.s2 is refused"):
            await update.join(offer(1, version=V2))
        with pytest.raises(LifecycleError, match="tp_rank=2"):
            await update.join(offer(2))
        await update.join(offer(1))
        await waiting

    asyncio.run(strangers())


def test_ranks_must_agree_on_the_structure():
    outcomes = asyncio.run(join_all(Engine(), [offer(0), offer(1, shape=(3,))]))
    assert all(isinstance(outcome, ManifestMismatchError) for outcome in outcomes)
