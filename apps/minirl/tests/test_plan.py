from types import SimpleNamespace

import pytest

from minirl import memory_budget
from minirl.config import load_config
from minirl.plan import make_plan
from rl_core.errors import ConfigError


def plan(*overrides):
    return make_plan(load_config(list(overrides)))


def test_the_default_plan_is_two_actors_and_one_replica():
    made = plan("cluster.device=cpu")
    assert (made.device, made.actor_world, made.rollout_world) == ("cpu", 2, 1)
    assert made.embedded_model
    assert (made.model_path / "config.json").exists()


def test_a_larger_tp_takes_one_replica_of_that_size():
    assert plan("rollout.tensor_model_parallel_size=2").rollout_world == 2


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["actor.engine_config.fsdp_size=3"], ["fsdp_size=3", "actor world of 2", "such as 2"]),
        (["rollout.tensor_model_parallel_size=4"], ["size=4", "pool of 2"]),
        (["rollout.name=vlm"], ["'vlm'", "vllm"]),
        (["rollout.name=sglan"], ["'sglan'", "sglang"]),
        (["actor.engine_config.backend=megatron"], ["megatron", "fsdp2"]),
        (["cluster.mode=fusd"], ["cluster.mode=fusd", "fused"]),
        (["algorithm.adv_estimator=grop"], ["adv_estimator=grop", "grpo"]),
        (["algorithm.ppo_mini_batch_size=100"], ["ppo_mini_batch_size=100", "256"]),
        (["trainer.total_training_steps=0"], ["total_training_steps=0", "at least 1"]),
        (["rollout.top_p=0"], ["top_p=0"]),
        (["rollout.kv_cache_memory_gb=9999"], ["kv_cache_memory_gb=9999", "free"]),
        (["actor.model_config.local_path=/no/such/model"], ["/no/such/model", "config.json"]),
        (["cluster.device=npu"], ["cluster.device=npu"]),
        (["cluster.rollout.n_gpus_per_node=3"], ["n_gpus_per_node=3"]),
        (["rollout.min_replicas=1"], ["min_replicas=1", "separate"]),
        (["config=separate", "rollout.min_replicas=0"], ["min_replicas=0", "at least 1"]),
        (["config=separate", "rollout.min_replicas=2"], ["min_replicas=2", "at most 1"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(overrides, parts):
    with pytest.raises(ConfigError) as caught:
        plan("cluster.device=cpu", *overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message


def test_two_engines_do_not_fit_where_one_does(monkeypatch):
    one = ["cluster.device=cpu", "rollout.kv_cache_memory_gb=1"]
    memory = SimpleNamespace(available=6 << 30)
    monkeypatch.setattr(memory_budget.psutil, "virtual_memory", lambda: memory)
    assert plan(*one).rollout_world == 1
    with pytest.raises(ConfigError, match="2 engines"):
        plan(*one, "cluster.rollout.n_gpus_per_node=2")
