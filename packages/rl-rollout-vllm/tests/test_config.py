"""Bad settings are refused before anything starts; good ones become engine arguments."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rl_core.errors import ConfigError, IncompatibleVersionError
from rl_core.interfaces import Placement
from rl_core.plugins import build_config
from rl_core.rollout.engine_arguments import check_known
from rl_core.rollout.version_range import VersionRange
from rl_rollout_vllm import server
from rl_rollout_vllm.config import VllmConfig
from rl_rollout_vllm.replica import VllmReplica
from rl_rollout_vllm.server_args import engine_args
from rl_rollout_vllm.server_env import server_env


@pytest.fixture
def path(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "torch.bfloat16"),
        ("dtype", "float64"),
        ("tensor_model_parallel_size", 0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0.0),
        ("kv_cache_memory_gb", -1.0),
        ("max_model_len", 0),
        ("bucket_megabytes", 0.0),
        ("start_timeout_s", 0.0),
        ("cpu_threads", 0),
    ],
)
def test_a_bad_value_is_named(path, key, value):
    with pytest.raises(ConfigError, match=rf"rollout\.{key}={value!r}"):
        VllmConfig(local_path=path, **{key: value})


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.local_path=.*config\.json"):
        VllmConfig(local_path=str(tmp_path))


@pytest.mark.parametrize("key", sorted(VllmConfig.own_engine_args))
def test_engine_arguments_of_our_own_are_refused(path, key):
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.{key}"):
        VllmConfig(local_path=path, engine_kwargs={key: 1})


def test_an_unknown_key_names_the_nearest(path):
    with pytest.raises(ConfigError, match=r"rollout\.max_model_length.*rollout\.max_model_len"):
        build_config(VllmConfig, {"local_path": path, "max_model_length": 3}, "rollout")


def test_an_unknown_engine_argument_names_the_nearest():
    with pytest.raises(ConfigError, match=r"max_num_seq.*did you mean 'max_num_seqs'"):
        check_known({"max_num_seq": 3}, ["max_num_seqs", "block_size"])


def test_cpu_gets_bytes_for_its_cache_and_no_share_of_the_memory(path):
    args = engine_args(VllmConfig(local_path=path), Placement(device="cpu"))
    assert args["kv_cache_memory_bytes"] == 1 << 28
    assert "gpu_memory_utilization" not in args
    assert "enable_sleep_mode" not in args


def test_accelerators_get_the_share_and_the_sleep_mode(path):
    args = engine_args(VllmConfig(local_path=path), Placement(device="cuda"))
    assert args["gpu_memory_utilization"] == 0.6
    assert args["enable_sleep_mode"] is True
    assert "kv_cache_memory_bytes" not in args


def test_engine_kwargs_win_and_settings_of_other_plugins_stay(path):
    extra = {"enforce_eager": False, "additional_config": {"other": 1}}
    args = engine_args(VllmConfig(local_path=path, engine_kwargs=extra), Placement())
    assert args["enforce_eager"] is False
    assert args["additional_config"] == {"other": 1, "rl_rollout_vllm": {"packed": False}}


def test_log_probs_are_those_of_the_sampled_distribution(path):
    args = engine_args(VllmConfig(local_path=path), Placement())
    assert args["logprobs_mode"] == "processed_logprobs"


def test_the_environment_shows_the_devices_to_the_server(path):
    config = VllmConfig(local_path=path)
    cuda = server_env(config, Placement(device="cuda", visible_devices=("2", "3")))
    npu = server_env(config, Placement(device="npu", visible_devices=("0",)))
    assert cuda["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert npu["ASCEND_RT_VISIBLE_DEVICES"] == "0"
    assert "OMP_NUM_THREADS" not in cuda


def test_threads_are_shared_by_the_ranks(path):
    config = VllmConfig(local_path=path, cpu_threads=3)
    assert server_env(config, Placement())["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_development_paths_are_served(path, device):
    """Among them is one that calls any method of a worker."""
    config = VllmConfig(local_path=path)
    assert server_env(config, Placement(device=device))["VLLM_SERVER_DEV_MODE"] == "0"


def test_a_placement_that_contradicts_the_config_is_refused(path):
    config = VllmConfig(local_path=path)
    with pytest.raises(ConfigError, match="2 ranks"):
        VllmReplica(config, launcher=None, placement=Placement(tp_size=2))
    with pytest.raises(ConfigError, match="one node"):
        VllmReplica(config, launcher=None, placement=Placement(nnodes=2))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("max_num_seq", 4, "max_num_seqs"),
        ("max_num_seqs", -4, "at least 1"),
        ("max_num_seqs", "abc", "int"),
    ],
)
def test_what_the_installed_engine_refuses_is_known_before_it_starts(path, key, value, named):
    """From its sources: it is not imported."""
    config = VllmConfig(local_path=path, engine_kwargs={key: value})
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.{key}.*{named}"):
        config.check_engine("cpu")


def test_what_the_installed_engine_takes_is_left_alone(path):
    good = {"max_num_seqs": 4, "enforce_eager": False, "kv_cache_dtype": "auto"}
    VllmConfig(local_path=path, engine_kwargs=good).check_engine("cpu")


def test_a_cache_that_holds_no_sequence_is_refused(path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    Path(path, "config.json").write_text(json.dumps(sizes))
    config = VllmConfig(local_path=path, max_model_len=512, kv_cache_memory_gb=0.000001)
    with pytest.raises(ConfigError, match=r"kv_cache_memory_gb=1e-06: \d+ tokens fit.* 512"):
        config.check_engine("cpu")
    VllmConfig(local_path=path, max_model_len=512, kv_cache_memory_gb=0.01).check_engine("cpu")


def test_an_engine_that_is_too_old_is_refused_before_it_is_imported(path, monkeypatch):
    too_new = replace(server.ENGINE, supported=VersionRange("99", "99"))
    monkeypatch.setattr(server, "ENGINE", too_new)
    replica = server.VllmServer(VllmConfig(local_path=path), Placement())
    with pytest.raises(IncompatibleVersionError, match=r"vLLM .* is too old: 99"):
        replica._import_engine()


def test_of_an_engine_newer_than_all_that_were_tried_a_line_says_so(path, monkeypatch, caplog):
    older = replace(server.ENGINE, supported=VersionRange("0.1", "0.2"))
    monkeypatch.setattr(server, "ENGINE", older)
    monkeypatch.setitem(sys.modules, "rl_rollout_vllm.engine_api", None)
    replica = server.VllmServer(VllmConfig(local_path=path), Placement())
    with pytest.raises(ImportError):
        asyncio.run(replica._start_engine(""))
    assert "is newer than all that were tried (0.1 to 0.2)" in caplog.text
