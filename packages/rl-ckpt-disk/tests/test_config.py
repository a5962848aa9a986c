import math

import pytest

from rl_ckpt_disk.config import DiskConfig
from rl_core.errors import ConfigError
from rl_core.plugins import CHECKPOINT_ENGINES, build_config, load_backend, load_object


def test_the_entry_point_leads_to_engine_and_config():
    backend = load_backend(CHECKPOINT_ENGINES, "disk")
    assert load_object(backend.config_cls) is DiskConfig
    assert load_object(backend.engine).__name__ == "DiskCheckpointEngine"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"root_dir": "relative"}, "absolute"),
        ({"model_dir": "/nowhere/at/all"}, "not a directory"),
        ({"keep_last": 0}, "at least 1"),
        ({"max_shard_megabytes": 0.0}, "positive"),
        ({"max_shard_megabytes": math.inf}, "not inf"),
        ({"keep_lst": 1}, "did you mean options.keep_last"),
        ({"keep_last": "two"}, "keep_last"),
    ],
)
def test_wrong_options_are_named(options, said):
    with pytest.raises(ConfigError, match=said):
        build_config(DiskConfig, options, "options")
