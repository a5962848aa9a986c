"""The adapter keeps the contract of all rollout adapters, on real engines."""

from typing import ClassVar

import pytest

from rl_core.testing.rollout_contract import (
    OnOneReplica,
    RolloutAdapterContract,
    RolloutCapability,
)
from rl_core.testing.rollout_failure_contract import FailureContract
from rl_core.testing.rollout_live_contract import LiveDigestContract
from rl_core.testing.rollout_memory_contract import MemoryContract
from rl_core.testing.rollout_pause_contract import PAUSES
from rl_core.testing.rollout_sync_contract import SyncContract

pytestmark = pytest.mark.engine

ELSEWHERE = {
    RolloutCapability.COLD_START: "compared with stock vLLM and transformers in test_equality",
    RolloutCapability.PAUSE_IN_PLACE: "vLLM's prefix cache would outlive the update; refused",
}

ONCE = {"test_released_kv_memory_leaves_the_process": "looked at in TestDense: the same code"}


class TestDense(RolloutAdapterContract):
    """Linear layers served from their live weights (the default on cpu)."""

    lacks: ClassVar = ELSEWHERE

    @pytest.fixture(scope="class")
    def rollout(self, under_test):
        return under_test("dense")


class TestMixtureOfExperts(
    FailureContract, SyncContract, LiveDigestContract, MemoryContract, OnOneReplica
):
    """Expert weights prepacked by vLLM; requests are served as in `TestDense`."""

    lacks: ClassVar = ELSEWHERE
    not_applicable: ClassVar = ONCE

    @pytest.fixture(scope="class")
    def rollout(self, under_test):
        return under_test("moe")


class TestTiedPackedOnTwoRanks(RolloutAdapterContract):
    """Tied embeddings, linear layers packed as vLLM does on cpu, each rank fed by an adapter."""

    lacks: ClassVar = ELSEWHERE | {
        RolloutCapability.FREES_WEIGHTS: "packed copies are no parameters and cannot be freed"
    }
    not_applicable: ClassVar = ONCE | dict.fromkeys(PAUSES, "looked at in TestDense: the same code")

    @pytest.fixture(scope="class")
    def rollout(self, under_test):
        return under_test("tied")
