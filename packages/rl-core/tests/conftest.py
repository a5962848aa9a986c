import contextlib
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from rl_core.deadlines import Deadline
from rl_core.interfaces import Placement
from rl_core.testing.process_holdings import private_bytes
from rl_core.testing.property_tests import no_time_limits
from rl_core.testing.reference_adapter import ReferenceAdapter
from rl_core.testing.reference_config import ReferenceConfig
from rl_core.testing.reference_layout import layout_spec
from rl_core.testing.reference_replica import ReferenceReplica
from rl_core.testing.reference_weights import EOS, ReferenceModelConfig, make_weights
from rl_core.testing.rollout_case import RolloutUnderTest
from rl_core.testing.thread_launcher import ThreadLauncher
from rl_core.testing.weights_directory import save_weights
from rl_core.versions import PolicyVersion

no_time_limits()

torch.set_num_threads(1)  # tensors here are tiny
sys.path.append(str(Path(__file__).parent))  # classes that launched processes import


@contextlib.contextmanager
def _started(launcher, config, tp_size, adapter=ReferenceAdapter):
    replica = ReferenceReplica(config, launcher, Placement(tp_size=tp_size))
    replica.start(Deadline.after(60))
    try:
        yield [adapter(replica.server, rank, config) for rank in range(tp_size)]
    finally:
        replica.shutdown(10)


@contextlib.contextmanager
def _cold(config, tp_size, weights):
    with (
        tempfile.TemporaryDirectory() as path,
        _started(ThreadLauncher(), config, tp_size) as adapters,
    ):
        save_weights(weights.tensors, Path(path))
        manifest = weights.manifest(PolicyVersion(1, 0))
        adapters[0].update_weights_from_disk(Path(path), manifest, Deadline.after(10))
        adapters[0].commit(manifest.version, 10)
        yield adapters


@contextlib.contextmanager
def _reference(tp_size=1, tied=True, launcher=None, server=None, adapter=ReferenceAdapter):
    sound = ReferenceConfig(ReferenceModelConfig(tied=tied))
    config = ReferenceConfig(sound.model, server=server or sound.server)
    with _started(launcher or ThreadLauncher(), config, tp_size, adapter) as adapters:
        yield RolloutUnderTest(
            adapters,
            make_weights(config.model, seed=1),
            make_weights(config.model, seed=2),
            prompts=[[5, 6, 7, 8], [5, 6, 9], [3]],
            cold=lambda weights: _cold(sound, tp_size, weights),
            save=lambda weights, path: save_weights(weights.tensors, path),
            layout=layout_spec(config.model),
            flip=lambda *what: adapters[0]._call("flip", *what, timeout=10),
            eos_id=EOS,
            long_tokens=300,
            stall_s=0.2,
            timeout_s=20.0,
            resident=lambda: private_bytes([os.getpid()]),
            filling=[[5, 6, 7]],
        )


@pytest.fixture(scope="session")
def reference():
    """A started reference replica, sound or broken, as the rollout contract wants it."""
    return _reference
