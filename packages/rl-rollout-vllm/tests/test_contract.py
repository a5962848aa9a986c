"""The adapter keeps the contract of all rollout adapters, on real engines."""

from typing import ClassVar

import pytest

from rl_core.testing.rollout_contract import RolloutAdapterContract, RolloutCapability

pytestmark = pytest.mark.engine

ELSEWHERE = {
    RolloutCapability.COLD_START: "compared with stock vLLM and transformers in test_equality",
    RolloutCapability.LIVE_DIGESTS: "the backend has no layout spec yet",
}


class TestDense(RolloutAdapterContract):
    lacks: ClassVar = ELSEWHERE

    @pytest.fixture(scope="class")
    def rollout(self, under_test):
        return under_test("dense")
