"""The adapter keeps the contract of all rollout adapters, on real engines."""

from typing import ClassVar

import pytest

from rl_core.testing.rollout_contract import RolloutAdapterContract, RolloutCapability

pytestmark = pytest.mark.engine

ELSEWHERE = {
    RolloutCapability.COLD_START: "compared with stock vLLM and transformers in test_equality",
}


class TestDense(RolloutAdapterContract):
    """Linear layers served from their live weights (the default on cpu)."""

    lacks: ClassVar = ELSEWHERE

    @pytest.fixture(scope="class")
    def rollout(self, under_test):
        return under_test("dense")


class TestMixtureOfExperts(RolloutAdapterContract):
    """Expert weights prepacked by vLLM."""

    lacks: ClassVar = ELSEWHERE

    @pytest.fixture(scope="class")
    def rollout(self, under_test):
        return under_test("moe")


class TestTiedPackedOnTwoRanks(RolloutAdapterContract):
    """Tied embeddings, linear layers packed as vLLM does on cpu, each rank fed by an adapter."""

    lacks: ClassVar = ELSEWHERE | {
        RolloutCapability.FREES_WEIGHTS: "packed copies are no parameters and cannot be freed"
    }

    @pytest.fixture(scope="class")
    def rollout(self, under_test):
        return under_test("tied")
