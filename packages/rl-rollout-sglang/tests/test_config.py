"""Bad settings are refused before anything starts; good ones become engine arguments."""

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rl_core.errors import ConfigError, IncompatibleVersionError
from rl_core.interfaces import Placement
from rl_core.plugins import build_config
from rl_core.rollout.engine_arguments import check_known
from rl_core.rollout.version_range import VersionRange
from rl_rollout_sglang import cpu_plugin, server
from rl_rollout_sglang.config import SglangConfig
from rl_rollout_sglang.cpu_plugin import NCCL_PATH, THREAD_BINDING, core_lists
from rl_rollout_sglang.replica import SglangReplica
from rl_rollout_sglang.server_args import kv_tokens, server_args
from rl_rollout_sglang.server_env import CPU_PLUGIN, server_env

SIZES = {
    "vocab_size": 80,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
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
        SglangConfig(local_path=path, **{key: value})


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.local_path=.*config\.json"):
        SglangConfig(local_path=str(tmp_path))


@pytest.mark.parametrize("key", sorted(SglangConfig.own_engine_args))
def test_engine_arguments_of_our_own_are_refused(path, key):
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.{key}"):
        SglangConfig(local_path=path, engine_kwargs={key: 1})


def test_an_unknown_key_names_the_nearest(path):
    with pytest.raises(ConfigError, match=r"rollout\.max_model_length.*rollout\.max_model_len"):
        build_config(SglangConfig, {"local_path": path, "max_model_length": 3}, "rollout")


def test_an_unknown_engine_argument_names_the_nearest():
    with pytest.raises(ConfigError, match=r"chunked_prefil.*did you mean 'chunked_prefill_size'"):
        check_known({"chunked_prefil": 3}, ["chunked_prefill_size", "page_size"])


def test_cpu_gets_as_many_tokens_as_fit_into_its_cache(path):
    config = SglangConfig(local_path=path, dtype="bfloat16")
    args = server_args(config, Placement(device="cpu"))
    # 2 layers, keys and values, 2 heads of 16 elements of 2 bytes
    assert args["max_total_tokens"] == (1 << 28) // 256
    assert args["device"] == "cpu"
    assert "enable_memory_saver" not in args


def test_the_ranks_share_the_heads(path):
    one = SglangConfig(local_path=path)
    two = SglangConfig(local_path=path, tensor_model_parallel_size=2)
    four = SglangConfig(local_path=path, tensor_model_parallel_size=4)
    assert kv_tokens(two, 1 << 20) == 2 * kv_tokens(one, 1 << 20)
    assert kv_tokens(four, 1 << 20) == kv_tokens(two, 1 << 20)


def test_a_model_that_does_not_tell_its_sizes_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"kv_cache_memory_gb.*num_attention_heads"):
        server_args(SglangConfig(local_path=str(tmp_path)), Placement(device="cpu"))


def test_accelerators_get_the_share_and_the_memory_saver(path):
    args = server_args(SglangConfig(local_path=path), Placement(device="cuda"))
    assert args["mem_fraction_static"] == 0.6
    assert args["enable_memory_saver"] is True
    assert "max_total_tokens" not in args
    assert "attention_backend" not in args


def test_engine_kwargs_win(path):
    extra = {"attention_backend": "intel_amx", "page_size": 16}
    args = server_args(SglangConfig(local_path=path, engine_kwargs=extra), Placement())
    assert args["attention_backend"] == "intel_amx"
    assert args["page_size"] == 16


def test_the_environment_shows_the_devices_to_the_server(path):
    config = SglangConfig(local_path=path)
    cuda = server_env(config, Placement(device="cuda", visible_devices=("2", "3")))
    npu = server_env(config, Placement(device="npu", visible_devices=("0",)))
    assert cuda["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert npu["ASCEND_RT_VISIBLE_DEVICES"] == "0"
    assert "OMP_NUM_THREADS" not in cuda


def test_no_patch_is_applied_where_an_accelerator_is(path):
    config = SglangConfig(local_path=path)
    assert CPU_PLUGIN in server_env(config, Placement(device="cpu"))
    assert CPU_PLUGIN not in server_env(config, Placement(device="cuda"))
    assert CPU_PLUGIN not in server_env(config, Placement(device="npu"))


def test_threads_are_shared_by_the_ranks(path):
    config = SglangConfig(local_path=path, cpu_threads=3)
    assert server_env(config, Placement())["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("cores", "ranks", "lists"),
    [([0, 1], 2, "0|1"), ([2, 3, 6, 7], 2, "2,3|6,7"), ([0, 1], 4, "0|1|0|1"), ([4], 2, "4|4")],
)
def test_cores_are_shared_by_the_ranks(cores, ranks, lists):
    assert core_lists(cores, ranks) == lists


@pytest.fixture
def installed(monkeypatch):
    """The plugin's variables after its start in a process with a given environment."""

    def installed(**environment):
        for name in (NCCL_PATH, THREAD_BINDING, CPU_PLUGIN):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        cpu_plugin.install()
        return os.environ.get(NCCL_PATH), os.environ.get(THREAD_BINDING)

    cpu_plugin.switch.disable(["rotary_import", "seeded_sampling", "batched_attention"])
    yield installed
    cpu_plugin.switch.disable([])


def test_the_plugin_keeps_ranks_from_nccl_and_from_each_others_cores(installed):
    nccl, binding = installed(**{CPU_PLUGIN: "2"})
    assert not Path(nccl).exists()
    assert len(binding.split("|")) == 2
    assert installed(**{CPU_PLUGIN: "2", THREAD_BINDING: "0|0"})[1] == "0|0"
    assert installed(**{CPU_PLUGIN: "1"}) == (nccl, None)
    assert installed() == (None, None)


def test_a_placement_that_contradicts_the_config_is_refused(path):
    config = SglangConfig(local_path=path)
    with pytest.raises(ConfigError, match="2 ranks"):
        SglangReplica(config, launcher=None, placement=Placement(tp_size=2))
    with pytest.raises(ConfigError, match="one node"):
        SglangReplica(config, launcher=None, placement=Placement(nnodes=2))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("max_running_request", 4, "max_running_requests"),
        ("max_running_requests", "abc", "int"),
    ],
)
def test_what_the_installed_engine_refuses_is_known_before_it_starts(path, key, value, named):
    """From its sources: it is not imported."""
    config = SglangConfig(local_path=path, engine_kwargs={key: value})
    with pytest.raises(ConfigError, match=rf"engine_kwargs\.{key}.*{named}"):
        config.check_engine("cpu")


def test_what_the_installed_engine_takes_is_left_alone(path):
    good = {"max_running_requests": 4, "page_size": 16, "disable_radix_cache": True}
    SglangConfig(local_path=path, engine_kwargs=good).check_engine("cpu")


def test_a_cache_that_holds_no_sequence_is_refused(path):
    config = SglangConfig(local_path=path, max_model_len=512, kv_cache_memory_gb=0.000001)
    with pytest.raises(ConfigError, match=r"kv_cache_memory_gb=1e-06: \d+ tokens fit.* 512"):
        config.check_engine("cpu")
    SglangConfig(local_path=path, max_model_len=512, kv_cache_memory_gb=0.01).check_engine("cpu")


def test_an_engine_that_is_too_old_is_refused_before_it_is_imported(path, monkeypatch):
    too_new = replace(server.ENGINE, supported=VersionRange("99", "99"))
    monkeypatch.setattr(server, "ENGINE", too_new)
    replica = server.SglangServer(SglangConfig(local_path=path), Placement())
    with pytest.raises(IncompatibleVersionError, match=r"SGLang .* is too old: 99"):
        replica._import_engine()


def test_of_an_engine_newer_than_all_that_were_tried_a_line_says_so(path, monkeypatch, caplog):
    older = replace(server.ENGINE, supported=VersionRange("0.1", "0.2"))
    monkeypatch.setattr(server, "ENGINE", older)
    monkeypatch.setitem(sys.modules, "rl_rollout_sglang.engine_api", None)
    replica = server.SglangServer(SglangConfig(local_path=path), Placement())
    with pytest.raises(ImportError):
        asyncio.run(replica._start_engine(""))
    assert "is newer than all that were tried (0.1 to 0.2)" in caplog.text
