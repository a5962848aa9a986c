import math

import pytest

from rl_ckpt_hccl import CHECKPOINT_BACKEND
from rl_ckpt_hccl.config import HcclConfig
from rl_core.errors import ConfigError
from rl_core.plugins import CHECKPOINT_ENGINES, build_config, load_backend, load_object


def test_entry_point_leads_to_the_engine():
    assert load_backend(CHECKPOINT_ENGINES, "hccl") == CHECKPOINT_BACKEND
    assert load_object(CHECKPOINT_BACKEND.config_cls) is HcclConfig
    assert load_object(CHECKPOINT_BACKEND.engine).__name__ == "HcclCheckpointEngine"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"communicator": "mpi"}, "communicator is 'mpi'"),
        ({"direct_share": 1.5}, "direct_share is 1.5"),
        ({"connect_timeout_s": 0.0}, "connect_timeout_s is 0.0"),
        ({"connect_timeout_s": math.nan}, "connect_timeout_s is nan"),
        ({"direct_shares": 0.5}, "did you mean options.direct_share"),
    ],
)
def test_bad_options_are_named(values, text):
    with pytest.raises(ConfigError, match=text):
        build_config(HcclConfig, values, "options")


@pytest.mark.parametrize(
    ("device", "library"), [("npu", "hccl"), ("cuda", "nccl"), ("cpu", "gloo")]
)
def test_library_follows_the_device(device, library):
    assert HcclConfig().communicator_for(device) == library
    assert HcclConfig(communicator=library).communicator_for(device) == library


def test_library_of_another_device_is_refused():
    with pytest.raises(ConfigError, match="'nccl' does not move tensors on 'cpu'; use 'gloo'"):
        HcclConfig(communicator="nccl").communicator_for("cpu")
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        HcclConfig().communicator_for("tpu")
