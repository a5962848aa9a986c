"""The adapter keeps the contract of all rollout adapters, on real engines."""

from typing import ClassVar

import pytest

from rl_core.testing.rollout_contract import RolloutAdapterContract, RolloutCapability

pytestmark = pytest.mark.engine

ELSEWHERE = {
    RolloutCapability.COLD_START: "compared with transformers in test_equality",
    RolloutCapability.LIVE_DIGESTS: "the backend has no layout spec yet",
}


class TestBracketed(RolloutAdapterContract):
    """Through SGLang's weight-update session."""

    lacks: ClassVar = ELSEWHERE

    @pytest.fixture(scope="class")
    def rollout(self, under_test):
        return under_test("dense")


class TestPlain(RolloutAdapterContract):
    """Through the model's loader alone, as for an SGLang that has no session."""

    lacks: ClassVar = ELSEWHERE
    not_applicable: ClassVar = {
        "test_refuses_requests_before_the_first_commit": "this engine has served before"
    }

    @pytest.fixture(scope="class")
    def rollout(self, under_test, engines):
        started = engines("dense")
        started.load_path("plain")
        yield under_test("dense")
        started.load_path("bracketed")
