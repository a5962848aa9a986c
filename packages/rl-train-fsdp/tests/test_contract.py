"""The contracts: of train engines, on one and two ranks, and of packages."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from rl_core.plugins import TRAIN_ENGINES, build_config
from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.package_contract import FOREIGN, PackageContract
from rl_core.testing.train_contract import TrainEngineContract, TrainUnderTest
from rl_core.trajectory import TrainSample
from rl_train_fsdp.config import FsdpConfig

SAMPLES = [
    TrainSample(
        [1, 2],
        [3 + index, 4, 5, 6],
        loss_mask=[1, 0, 1, 1],
        advantages=[1.0, 0.5, -1.0, 0.3 * index],
        temperature=1.0 + 0.1 * index,
    )
    for index in range(4)
]


@pytest.mark.engine
class TestFsdp(TrainEngineContract):
    @pytest.fixture(scope="class", params=[1, 2])
    @classmethod
    def train(cls, request, models, tmp_path_factory):
        launcher = ProcessLauncher(tmp_path_factory.mktemp("logs"))
        path = models("tied")

        def make_config(rate, world_size):
            engine = {"dtype": "float32", "fsdp_size": world_size, "timeout_s": 20.0}
            model, optimizer = {"local_path": str(path)}, {"lr": rate}
            sections = {"model": model, "engine": engine, "optimizer": optimizer}
            return build_config(FsdpConfig, sections, "actor")

        engine = "rl_train_fsdp.engine:FsdpTrainEngine"
        return TrainUnderTest(engine, make_config, SAMPLES, request.param, launcher)


class TestPackage(PackageContract):
    distribution = "rl-train-fsdp"
    module = "rl_train_fsdp"
    entry = (TRAIN_ENGINES, "fsdp2")
    blocked = ("transformers", *FOREIGN)
    config: ClassVar[Mapping[str, Any]] = {"model": {"local_path": "/models/tiny"}}
