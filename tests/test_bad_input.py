"""Bad input: one line, exit code 2, nothing started, nothing written."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from whole_runs import MARK, marked_processes

from minirl.config import load_config
from minirl.model_directory import edit_json
from minirl.resume_settings import model_digest, shared_settings
from minirl.run_state import RunState
from minirl.tiny_model import ensure_tiny_model

FORKS = Path(__file__).parent / "forked_runs.py"


@pytest.fixture
def broken_models(tmp_path):
    """Model directories that cannot work, by what is wrong with them."""
    source = ensure_tiny_model()
    made = {}
    for name in (
        "empty",
        "truncated",
        "padded",
        "headless",
        "wordless",
        "mute",
        "verbose",
        "narrow",
    ):
        made[name] = tmp_path / name
        shutil.copytree(source, made[name])
    (made["empty"] / "config.json").unlink()
    weights = made["truncated"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with (made["padded"] / "model.safetensors").open("ab") as weights:
        weights.write(bytes(64))
    (made["mute"] / "tokenizer_config.json").write_text("[]")
    edit_json(made["verbose"] / "tokenizer_config.json", model_max_length="x")
    (made["headless"] / "config.json").write_text("{not json")
    edit_json(made["narrow"] / "config.json", hidden_size=96)
    for file in made["wordless"].glob("*token*"):
        file.unlink()
    return made


@pytest.fixture(scope="module")
def forks():
    """Runs that end before they start anything share one interpreter."""
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, str(FORKS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark},
    ) as process:
        yield process, mark
        process.stdin.close()
        process.wait(20)


@pytest.fixture
def refused(forks, tmp_path):
    """The single line with which a run refuses its arguments."""
    process, mark = forks

    def refused(*arguments, run_dir=None):
        log, path = tmp_path / "log", tmp_path / "cwd"
        path.mkdir()
        target = run_dir or path / "run"
        request = [[*arguments, f"trainer.run_dir={target}"], str(log), str(path)]
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        lines = log.read_text().splitlines()
        assert code == 2, lines
        assert len(lines) == 1, lines
        assert list(path.iterdir()) == []
        assert marked_processes(mark) == [process.pid]
        return lines[0]

    return refused


def test_a_command_line_of_its_own(runner):
    """As all others here, in a process that was started for it."""
    run = runner.complete("trainer.sed=1", timeout=90)
    assert run.code == 2
    assert run.lines == [
        "[MiniRL] error: trainer.sed=1: unknown key trainer.sed; the nearest is trainer.seed"
    ]
    assert not run.run_dir.exists()
    assert run.left() == []


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("trainer.sed=1", ["trainer.sed", "trainer.seed"]),
        ("trainer.seed=many", ["trainer.seed", "many"]),
        ("trainer.seed=???", ["trainer.seed"]),
        ("trainer.seed=${nothing}", ["trainer.seed", "nothing"]),
        ("trainer.seed=-1", ["trainer.seed=-1", "at least 0"]),
        ("algorithm.ppo_mini_batch_size=0", ["algorithm.ppo_mini_batch_size=0"]),
        ("rollout.local_path=/no/model", ["rollout.local_path=/no/model", "config.json"]),
        ("data.reasoning_gym=5", ["data.reasoning_gym", "name"]),
        ("rollout.temperature=0", ["rollout.temperature", "greater than 0"]),
        ("rollout.kv_cache_memory_gb=nan", ["rollout.kv_cache_memory_gb", "finite"]),
        ("rollout.max_completion_length=600", ["rollout.max_completion_length=600", "1024"]),
        ("actor.engine_config.fsdp_size=3", ["fsdp_size=3"]),
        ("rollout.tensor_model_parallel_size=4", ["tensor_model_parallel_size=4"]),
        ("rollout.engine_kwargs.max_num_seq=4", ["engine_kwargs.max_num_seq", "max_num_seqs"]),
        ("rollout.kv_cache_memory_gb=0.000001", ["kv_cache_memory_gb=1e-06", "tokens fit"]),
        ("rollout.kv_cache_memory_gb=4000", ["kv_cache_memory_gb=4000", "free"]),
        ("rollout.name=sglan", ["rollout.name: ", "'sglan'", "'sglang'", "install"]),
        ("rollout.name=trtllm", ["'trtllm'", "install", "minirl.rollout_backends"]),
        ("checkpoint_engine.backend=nixl", ["'nixl'", "install", "minirl.checkpoint_engines"]),
        ("cluster.actor.nnodes=2", ["cluster.actor.nnodes=2", "cluster.ray_address"]),
        ("cluster.ray_address=127.0.0.1:1", ["ray_address=127.0.0.1:1", "Connection refused"]),
        ("reward.path=/no/such/file.py", ["/no/such/file.py"]),
        ("data.path=/no/such/prompts.jsonl", ["/no/such/prompts.jsonl"]),
        ("data.task=/no/such/task.py", ["data.task=/no/such/task.py", "no such file"]),
        ("data.on_long_prompt=cut", ["data.on_long_prompt=cut", "drop", "truncate"]),
        ("config=~nosuchuser/mine.yaml", ["config=~nosuchuser/mine.yaml", "no such preset"]),
        ("data.reasoning_gym={name: gcd, size: 99999999999}", ["size=99999999999", "at most"]),
        ('data.path="a\\nb"', ["a\\nb: cannot be read"]),
        ("data.path=" + "x" * 300, ["xxx: File name too long"]),
        ("reward.path=7", ["reward.path", "FILE.py"]),
        ("reward.weights=[1.0,2.0]", ["reward.weights=[1.0, 2.0]", "2 weights for 1 reward"]),
        ("trainer.report_to=[wandb]", ["trainer.report_to=wandb", "rl-minirl[wandb]"]),
        ("trainer.resume=/no/such/step_000002", ["trainer.resume=/no/such/step_000002"]),
        ("trian", ["trian", "train"]),
    ],
)
def test_it_is_refused_in_one_line(refused, argument, parts):
    line = refused(argument)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("empty", "config.json"),
        ("truncated", "model.safetensors"),
        ("padded", "64 bytes after its last tensor"),
        ("headless", "config.json"),
        ("wordless", "tokenizer"),
        ("mute", "the tokenizer cannot be loaded"),
        ("verbose", "the tokenizer cannot be loaded"),
        ("narrow", "hidden_size"),
    ],
)
def test_a_model_directory_that_cannot_be_loaded(refused, broken_models, name, part):
    path = broken_models[name]
    line = refused(f"actor.model_config.local_path={path}")
    assert str(path) in line
    assert part in line


def test_an_engine_that_would_load_another_model(refused, broken_models):
    line = refused(f"rollout.local_path={broken_models['narrow']}")
    assert "rollout.local_path" in line
    assert "hidden_size is 96, the model that is trained has 192" in line


def test_an_exchange_directory_that_cannot_be_written(refused):
    line = refused(
        "config=separate",
        "checkpoint_engine.backend=disk",
        "checkpoint_engine.root_dir=/dev/null/exchange",
    )
    assert "checkpoint_engine.root_dir=/dev/null/exchange" in line


@pytest.mark.parametrize(
    ("content", "part"), [(b"\xff\xfe\0", "mine.yaml: "), (b"trainer:\n  {", "mine.yaml:3: ")]
)
def test_a_preset_that_cannot_be_read(refused, tmp_path, content, part):
    preset = tmp_path / "mine.yaml"
    preset.write_bytes(content)
    assert part in refused(f"config={preset}")


@pytest.mark.parametrize("broken", ['{"prompt": ', "[" * 3000], ids=["cut off", "nested"])
def test_a_broken_line_of_a_prompt_file_is_named(refused, tmp_path, broken):
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": "say 1:"}), json.dumps({"prompt": "say 2:"}), broken]
    prompts.write_text("\n".join(lines))
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(prompts, **columns):\n    return [0.0] * len(prompts)\n")
    line = refused(f"data.path={prompts}", f"reward.path={reward}")
    assert f"{prompts}:3" in line


@pytest.fixture
def reward(tmp_path):
    path = tmp_path / "fine.py"
    path.write_text("def reward(prompts, **columns):\n    return [0.0] * len(prompts)\n")
    return f"reward.path={path}"


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        ({"promt": ["say 1:"]}, ["no column 'prompt'", "nearest is 'promt'"]),
        ({"prompt": [1, 2]}, ["the type int64"]),
        ({"prompt": ["say 1:", ""]}, ["row 1", "empty"]),
        ({"prompt": ["say 1:", "x" * 600]}, ["row 1", "603 tokens", "data.on_long_prompt"]),
    ],
)
def test_a_parquet_file_that_does_not_fit(refused, reward, tmp_path, columns, parts):
    path = tmp_path / "prompts.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    line = refused(f"data.path={path}", reward, "data.eval_size=0")
    for part in [str(path), *parts]:
        assert part in line


def test_weights_for_other_functions(refused, reward, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "say 1:"}\n')
    arguments = (f"data.path={path}", reward, "data.eval_size=0", "reward.weights=[1,2,3]")
    assert "3 weights for 1 reward functions" in refused(*arguments)


def test_a_reward_file_without_the_function_is_named(refused, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompts, **columns):\n    return [0.0] * len(prompts)\n")
    line = refused(f"reward.path={reward}:grade")
    assert "grade" in line
    assert "score" in line


def test_a_run_directory_that_cannot_be_written(refused, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a directory is wanted")
    line = refused(run_dir=blocked)
    assert f"trainer.run_dir={blocked}" in line


def test_a_directory_that_holds_a_run_is_not_overwritten(refused, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    line = refused(run_dir=tmp_path)
    assert f"trainer.run_dir={tmp_path}" in line
    assert (tmp_path / "metrics.jsonl").read_text() == "{}"


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("trainer.seed=2", "trainer.seed=2: "),
        ("data.num_generations=4", "data.num_generations=4: "),
        ("trainer.total_training_steps=1", "trainer.total_training_steps=1: "),
    ],
)
def test_a_checkpoint_that_the_settings_contradict(refused, tmp_path, argument, part):
    config = load_config([])
    state = RunState(
        step=2,
        version="e1.s2",
        settings=shared_settings(config),
        model_digest=model_digest(ensure_tiny_model()),
    )
    checkpoint = tmp_path / "step_000002"
    checkpoint.mkdir()
    state.write(checkpoint)
    line = refused(f"trainer.resume={checkpoint}", argument)
    assert part in line
    assert str(checkpoint) in line
