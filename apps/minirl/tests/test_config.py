import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirl.config import MiniRLConfig, as_yaml, load_config
from rl_core.errors import ConfigError


def test_the_schema_has_the_documented_defaults():
    config = MiniRLConfig()
    assert config.actor.optimizer_config.lr == 1e-5
    assert config.checkpoint_engine.update_weights_bucket_megabytes == 2048
    assert (config.trainer.total_training_steps, config.trainer.sync_freq) == (90, 1)


def test_without_arguments_the_embedded_model_is_trained_in_fused_mode():
    config = load_config([])
    assert config.cluster.mode == "fused"
    assert config.actor.model_config.local_path is None
    assert config.actor.optimizer_config.lr == 1.5e-3
    assert config.rollout.dtype == "float32"


def test_layers_override_each_other_from_left_to_right(tmp_path):
    layer = tmp_path / "mine.yaml"
    layer.write_text("trainer: {seed: 5, sync_freq: 3}\n")
    config = load_config([f"config=smollm2,{layer}", "trainer.seed=7"])
    assert (config.trainer.seed, config.trainer.sync_freq) == (7, 3)
    assert config.actor.optimizer_config.lr == 2e-5


def test_a_preset_below_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("trainer: {seed: 5}")
    assert load_config(["config=~/mine.yaml"]).trainer.seed == 5


def test_the_rollout_follows_the_model_path():
    config = load_config(["actor.model_config.local_path=/models/x"])
    assert config.rollout.local_path == "/models/x"


def test_open_sections_take_any_key():
    config = load_config(
        ["rollout.engine_kwargs.max_num_seqs=4", "data.reasoning_gym={name: gcd, size: 3}"]
    )
    assert config.rollout.engine_kwargs == {"max_num_seqs": 4}
    assert config.data.reasoning_gym == {"name": "gcd", "size": 3}


def test_another_data_set_replaces_that_of_a_preset_with_its_options():
    config = load_config(["config=smollm2", "data.reasoning_gym={name: gcd}"])
    assert config.data.reasoning_gym == {"name": "gcd"}
    assert load_config(["config=smollm2", "data.reasoning_gym=gcd"]).data.reasoning_gym == "gcd"
    changed = load_config(["config=smollm2", "data.reasoning_gym.max_digits=1"])
    assert changed.data.reasoning_gym["name"] == "basic_arithmetic"
    assert changed.data.reasoning_gym["max_digits"] == 1


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("trainer.sed=3", ["trainer.sed", "trainer.seed"]),
        ("roll_out.name=vllm", ["roll_out", "rollout"]),
        ("trainer.seed=abc", ["trainer.seed", "abc", "Integer"]),
        ("cluster.actor.n_gpus_per_node=2.5", ["n_gpus_per_node", "2.5"]),
        ("rollout=3", ["rollout=3"]),
        ("rollout.engine_kwargs=[1]", ["rollout.engine_kwargs=[1]", "container"]),
        ("data.shuffle=2", ["data.shuffle=2", "true or false"]),
        ("reward.per_group=2", ["per_group", "true or false"]),
        ("reward.per_gruop=true", ["reward.per_gruop", "reward.per_group"]),
        ("checkpoint_engine.debug.strict=-1", ["strict", "true or false"]),
        ("config=fusd", ["fusd", "fused"]),
        ("config=/no/such.yaml", ["/no/such.yaml"]),
        ("config=~nosuchuser/mine.yaml", ["~nosuchuser/mine.yaml", "no such preset"]),
        ("nonsense", ["nonsense", "key=value"]),
        ("trainer.seed={", ["trainer.seed"]),
        ("trainer.seed=" + "9" * 5000, ["trainer.seed"]),
        ("trainer.run_dir=\udcff", ["trainer.run_dir"]),
        ('data.path="a\\0b"', ["data.path", "zero byte"]),
        ('reward.path=["a\\0b"]', ["reward.path", "zero byte"]),
        ("reward.path=[null]", ["reward.path", "FILE.py"]),
        ("reward.weights=[[]]", ["reward.weights", "Float"]),
        ("trainer.report_to=[{a: b}]", ["trainer.report_to"]),
        ("data.reasoning_gym={name: gcd, 1: 2}", ["data.reasoning_gym", "the key 1"]),
        ("rollout.engine_kwargs=" + "{a: " * 300 + "1" + "}" * 300, ["nested too deeply"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it(argument, parts):
    with pytest.raises(ConfigError) as caught:
        load_config([argument])
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message


def test_presets_given_twice_are_not_dropped():
    with pytest.raises(ConfigError, match=r"given twice.* config=separate,smollm2$"):
        load_config(["config=separate", "trainer.seed=2", "config=smollm2"])


@settings(deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_no_argument_crashes_the_reader(key, value):
    message = "accepted"
    try:
        load_config([f"{key}={value}"])
    except ConfigError as error:
        message = str(error)
    assert len(message.splitlines()) == 1


def test_the_written_configuration_reads_back(tmp_path):
    config = load_config(["trainer.seed=9", "rollout.temperature=0.7"])
    path = tmp_path / "config.yaml"
    path.write_text(as_yaml(config))
    assert load_config([f"config={path}"]) == config
