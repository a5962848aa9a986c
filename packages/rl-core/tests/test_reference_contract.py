from collections.abc import Iterator
from typing import ClassVar

import pytest

from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.rollout_contract import RolloutAdapterContract, RolloutUnderTest

TINY = {"test_released_kv_memory_leaves_the_process": "its KV memory is too small to be seen"}


class TestTiedReference(RolloutAdapterContract):
    not_applicable: ClassVar = TINY

    @pytest.fixture(scope="class")
    @classmethod
    def rollout(cls, reference) -> Iterator[RolloutUnderTest]:
        with reference() as given:
            yield given


class TestTwoRanksInProcesses(RolloutAdapterContract):
    """The same across a process border: everything pickles, nothing is shared by accident."""

    not_applicable: ClassVar = TINY

    @pytest.fixture(scope="class")
    @classmethod
    def rollout(cls, reference, tmp_path_factory) -> Iterator[RolloutUnderTest]:
        launcher = ProcessLauncher(tmp_path_factory.mktemp("logs"))
        with reference(tp_size=2, tied=False, launcher=launcher) as given:
            yield given
