import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_core.deadlines import Deadline
from rl_core.interfaces import Placement
from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.reference_adapter import ReferenceAdapter
from rl_core.testing.reference_config import ReferenceConfig
from rl_core.testing.reference_replica import ReferenceReplica
from rl_core.testing.reference_weights import EOS, ReferenceModelConfig, make_weights
from rl_core.testing.rollout_contract import RolloutAdapterContract, RolloutUnderTest
from rl_core.testing.thread_launcher import ThreadLauncher
from rl_core.testing.weights_directory import save_weights
from rl_core.versions import PolicyVersion


@contextlib.contextmanager
def started(launcher, config, tp_size):
    replica = ReferenceReplica(config, launcher, Placement(tp_size=tp_size))
    replica.start(Deadline.after(60))
    try:
        yield [ReferenceAdapter(replica.server, rank, config) for rank in range(tp_size)]
    finally:
        replica.shutdown(10)


@contextlib.contextmanager
def under_test(launcher, tp_size, *, tied):
    config = ReferenceConfig(ReferenceModelConfig(tied=tied))
    with started(launcher, config, tp_size) as adapters:

        @contextlib.contextmanager
        def cold(weights):
            with (
                tempfile.TemporaryDirectory() as path,
                started(ThreadLauncher(), config, tp_size) as fresh,
            ):
                save_weights(weights.tensors, Path(path))
                manifest = weights.manifest(PolicyVersion(1, 0))
                fresh[0].update_weights_from_disk(Path(path), manifest, Deadline.after(10))
                fresh[0].commit(manifest.version, 10)
                yield fresh

        yield RolloutUnderTest(
            adapters,
            make_weights(config.model, seed=1),
            make_weights(config.model, seed=2),
            prompts=[[5, 6, 7, 8], [5, 6, 9], [3]],
            cold=cold,
            save=lambda weights, path: save_weights(weights.tensors, path),
            eos_id=EOS,
            long_tokens=300,
            stall_s=0.2,
            timeout_s=20.0,
        )


class TestTiedReference(RolloutAdapterContract):
    @pytest.fixture(scope="class")
    def rollout(self) -> Iterator[RolloutUnderTest]:
        with under_test(ThreadLauncher(), 1, tied=True) as given:
            yield given


class TestInProcesses(RolloutAdapterContract):
    """The same across a process border: everything pickles, nothing is shared by accident."""

    @pytest.fixture(scope="class")
    def rollout(self, tmp_path_factory) -> Iterator[RolloutUnderTest]:
        launcher = ProcessLauncher(tmp_path_factory.mktemp("logs"))
        with under_test(launcher, 2, tied=True) as given:
            yield given


class TestTwoRanks(RolloutAdapterContract):
    @pytest.fixture(scope="class")
    def rollout(self) -> Iterator[RolloutUnderTest]:
        with under_test(ThreadLauncher(), 2, tied=False) as given:
            yield given
