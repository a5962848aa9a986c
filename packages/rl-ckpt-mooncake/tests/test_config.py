import math

import pytest

from rl_ckpt_mooncake import CHECKPOINT_BACKEND
from rl_ckpt_mooncake.config import MooncakeConfig
from rl_core.errors import ConfigError
from rl_core.plugins import CHECKPOINT_ENGINES, build_config, load_backend, load_object


def test_entry_point_leads_to_the_engine():
    assert load_backend(CHECKPOINT_ENGINES, "mooncake") == CHECKPOINT_BACKEND
    assert load_object(CHECKPOINT_BACKEND.config_cls) is MooncakeConfig
    assert load_object(CHECKPOINT_BACKEND.engine).__name__ == "MooncakeCheckpointEngine"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"protocol": "shm"}, "protocol is 'shm', must be one of auto, tcp, rdma, ascend"),
        ({"piece_megabytes": 0.001}, "piece_megabytes is 0.001"),
        ({"piece_megabytes": math.inf}, "piece_megabytes is inf"),
        ({"piece_megabytes": math.nan}, "piece_megabytes is nan"),
        ({"stall_timeout_s": 0}, "stall_timeout_s is 0"),
        ({"protocoll": "tcp"}, "did you mean options.protocol"),
    ],
)
def test_bad_options_are_named(values, text):
    with pytest.raises(ConfigError, match=text):
        build_config(MooncakeConfig, values, "options")


@pytest.mark.parametrize(
    ("device", "protocol"), [("npu", "ascend"), ("cuda", "rdma"), ("cpu", "tcp")]
)
def test_protocol_follows_the_device(device, protocol):
    assert MooncakeConfig().protocol_for(device) == protocol
    assert MooncakeConfig(protocol=protocol).protocol_for(device) == protocol


def test_protocol_of_another_device_is_refused():
    with pytest.raises(ConfigError, match="'ascend' does not move memory of 'cpu'; use 'tcp' or"):
        MooncakeConfig(protocol="ascend").protocol_for("cpu")
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        MooncakeConfig().protocol_for("tpu")
