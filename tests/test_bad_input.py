"""Bad input: one line, exit code 2, nothing started, nothing written."""

import json
import shutil

import pytest

from minirl.tiny_model import ensure_tiny_model


@pytest.fixture
def broken_models(tmp_path):
    """Model directories that cannot work, by what is wrong with them."""
    source = ensure_tiny_model()
    made = {}
    for name in ("empty", "truncated", "headless"):
        made[name] = tmp_path / name
        shutil.copytree(source, made[name])
    (made["empty"] / "config.json").unlink()
    weights = made["truncated"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (made["headless"] / "config.json").write_text("{not json")
    return made


def refused(runner, *arguments, run_dir=None):
    """The single line with which a run refuses its arguments."""
    run = runner.complete(*arguments, timeout=90, run_dir=run_dir)
    assert run.code == 2, run.log
    assert len(run.lines) == 1, run.log
    assert not (run.path / "run").exists()
    assert run.processes() == []
    return run.lines[0]


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("trainer.sed=1", ["trainer.sed", "trainer.seed"]),
        ("trainer.seed=many", ["trainer.seed", "many"]),
        ("actor.engine_config.fsdp_size=3", ["fsdp_size=3"]),
        ("rollout.tensor_model_parallel_size=4", ["tensor_model_parallel_size=4"]),
        ("rollout.kv_cache_memory_gb=4000", ["kv_cache_memory_gb=4000", "free"]),
        ("rollout.name=sglang", ["pip install rl-rollout-sglang"]),
        ("reward.path=/no/such/file.py", ["/no/such/file.py"]),
        ("data.path=/no/such/prompts.jsonl", ["/no/such/prompts.jsonl"]),
        ("trian", ["trian", "train"]),
    ],
)
def test_it_is_refused_in_one_line(runner, argument, parts):
    line = refused(runner, argument)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("name", "part"),
    [("empty", "config.json"), ("truncated", "model.safetensors"), ("headless", "config.json")],
)
def test_a_model_directory_that_cannot_be_loaded(runner, broken_models, name, part):
    path = broken_models[name]
    line = refused(runner, f"actor.model_config.local_path={path}")
    assert str(path) in line
    assert part in line


def test_a_broken_line_of_a_prompt_file_is_named(runner, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": "say 1:"}), json.dumps({"prompt": "say 2:"}), '{"prompt": ']
    prompts.write_text("\n".join(lines))
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(prompts, **columns):\n    return [0.0] * len(prompts)\n")
    line = refused(runner, f"data.path={prompts}", f"reward.path={reward}")
    assert f"{prompts}:3" in line


def test_a_reward_file_without_the_function_is_named(runner, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompts, **columns):\n    return [0.0] * len(prompts)\n")
    line = refused(runner, f"reward.path={reward}:grade")
    assert "grade" in line
    assert "score" in line


def test_a_run_directory_that_cannot_be_written(runner, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a directory is wanted")
    line = refused(runner, run_dir=blocked)
    assert f"trainer.run_dir={blocked}" in line


def test_a_directory_that_holds_a_run_is_not_overwritten(runner, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    line = refused(runner, run_dir=tmp_path)
    assert f"trainer.run_dir={tmp_path}" in line
    assert (tmp_path / "metrics.jsonl").read_text() == "{}"
