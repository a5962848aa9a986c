"""The adapter keeps the contract of all rollout adapters, on real engines."""

from typing import ClassVar

import pytest

from rl_core.testing.rollout_case import RolloutCase
from rl_core.testing.rollout_contract import OnOneReplica, RolloutAdapterContract
from rl_core.testing.rollout_failure_contract import FailureContract
from rl_core.testing.rollout_live_contract import LiveDigestContract
from rl_core.testing.rollout_pause_contract import PAUSES

pytestmark = pytest.mark.engine


class TestBracketed(RolloutAdapterContract):
    """Through SGLang's weight-update session."""

    @pytest.fixture(scope="class")
    def rollout(self, under_test):
        return under_test("dense")


class TestPlain(RolloutAdapterContract):
    """Through the model's loader alone, as for an SGLang that has no session."""

    not_applicable: ClassVar = dict.fromkeys(
        (*PAUSES, "test_released_kv_memory_leaves_the_process"),
        "looked at in TestBracketed: the same code",
    )

    @pytest.fixture(scope="class")
    def rollout(self, under_test, engines):
        started = engines("dense")
        started.load_path("plain")
        yield under_test("dense")
        started.load_path("bracketed")


class OneKind(LiveDigestContract, OnOneReplica, contract=True):
    """The part of the contract about live digests, on the models of the other tests."""

    kind: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def rollout(cls, under_test):
        return under_test(cls.kind)


class TestLiveMixtureOfExperts(OneKind):
    """Stacked experts."""

    kind = "moe"


class TestLiveTiedOnTwoRanks(OneKind):
    """A tied head, and slices of everything."""

    kind = "tied"


@pytest.mark.parametrize(
    "failure", ["a_rank_that_fails_lets_the_others_end", "missing_rank_ends_by_the_deadline"]
)
def test_two_ranks_end_a_failed_update_together(under_test, failure):
    """SGLang's ranks meet as an update session begins and as it ends, failed or not."""
    getattr(FailureContract(), f"test_{failure}")(RolloutCase(under_test("tied")))
