import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import ConfigError
from rl_core.plugins import TRAIN_ENGINES, build_config, load_backend, load_object
from rl_train_fsdp.config import FsdpConfig, OptimizerConfig
from rl_train_fsdp.schedules import learning_rate


def build(**sections):
    return build_config(FsdpConfig, {"model": {"local_path": "/model"}, **sections}, "actor")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engine": {"dtpye": "float32"}}, "did you mean actor.engine.dtype"),
        ({"engine": {"dtype": "float16"}}, "float16"),
        ({"engine": {"fsdp_size": 0}}, "fsdp_size must be greater than 0"),
        ({"engine": {"fsdp_size": "2"}}, "int"),
        ({"engine": {"wire_dtype": "int8"}}, "wire_dtype 'int8'"),
        ({"optimizer": {"lr": -1.0}}, "lr must be 0 or more"),
        ({"optimizer": {"lr": float("nan")}}, "lr must be 0 or more"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "betas"),
        ({"optimizer": {"lr_scheduler_type": "cosine"}}, "needs total_training_steps"),
        ({"loss": {"loss_agg_mode": "mean"}}, "mean"),
        ({"loss": {"ppo_mini_batch_size": 0}}, "ppo_mini_batch_size"),
        ({"model": {}}, "local_path"),
    ],
)
def test_a_wrong_value_is_a_config_error(sections, message):
    with pytest.raises(ConfigError, match="actor") as caught:
        build(**sections)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_world_must_be_a_multiple_of_fsdp_size():
    config = build(engine={"fsdp_size": 2})
    config.check_world(4)
    with pytest.raises(ConfigError, match="2 does not divide the number of actor ranks, 3"):
        config.check_world(3)


def test_the_entry_point_loads_without_torch():
    code = (
        "import sys; from rl_core.plugins import TRAIN_ENGINES, load_backend, load_object;"
        "backend = load_backend(TRAIN_ENGINES, 'fsdp2'); load_object(backend.config_cls);"
        "sys.exit(int('torch' in sys.modules or 'transformers' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_entry_point_names_the_engine():
    backend = load_backend(TRAIN_ENGINES, "fsdp2")
    assert load_object(backend.engine).__name__ == "FsdpTrainEngine"
    assert load_object(backend.config_cls) is FsdpConfig


def test_learning_rates_by_hand():
    cosine = OptimizerConfig(
        lr=1.0, lr_scheduler_type="cosine", warmup_steps=4, total_training_steps=12
    )
    warm = [learning_rate(cosine, step) for step in range(4)]
    assert warm == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(cosine, 4) == 1.0
    # Half way down the cosine: the mean of 1 and 0.1.
    assert learning_rate(cosine, 8) == pytest.approx(0.55)
    assert learning_rate(cosine, 12) == pytest.approx(0.1)
    assert learning_rate(cosine, 1000) == pytest.approx(0.1)
    linear = OptimizerConfig(
        lr=2.0, lr_scheduler_type="linear", total_training_steps=10, min_lr_ratio=0.0
    )
    assert learning_rate(linear, 5) == pytest.approx(1.0)
    assert learning_rate(OptimizerConfig(lr=3.0), 10**6) == 3.0


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_training_shorter_than_its_warm_up_ends_while_the_rate_rises(kind):
    config = OptimizerConfig(lr=1.0, lr_scheduler_type=kind, warmup_steps=4, total_training_steps=2)
    assert [learning_rate(config, step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(config, 4) == pytest.approx(1.0 if kind == "constant" else 0.1)


@given(
    kind=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    decay=st.integers(1, 50),
    ratio=st.floats(0, 1),
)
def test_a_schedule_rises_then_falls_within_its_bounds(kind, warmup, decay, ratio):
    config = OptimizerConfig(
        lr=1.0,
        lr_scheduler_type=kind,
        warmup_steps=warmup,
        total_training_steps=warmup + decay,
        min_lr_ratio=ratio,
    )
    rates = [learning_rate(config, step) for step in range(warmup + decay + 3)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert max(rates) == pytest.approx(1.0)
    assert min(rates[warmup:]) >= ratio - 1e-12
