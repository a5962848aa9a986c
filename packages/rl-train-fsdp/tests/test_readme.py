"""The README's program and its claims about options."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from rl_core.testing.readme_program import run_program
from rl_train_fsdp.config import FsdpConfig

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text()


def test_the_program_runs(save_model, make_config, free_port, tmp_path):
    path = save_model(tmp_path / "model", make_config("tied"))
    printed = run_program(README, tmp_path, str(path), str(free_port()))
    assert "model.embed_tokens.weight (61, 32) float32" in printed
    assert (tmp_path / "model-trained" / "model.safetensors").is_file()


def test_the_options_exist():
    sections = {item.name: item.type for item in dataclasses.fields(FsdpConfig)}
    for section, key in re.findall(r"\| `(\w+)\.(\w+)` \|", TEXT):
        assert key in {item.name for item in dataclasses.fields(sections[section])}


def test_the_benchmark_runs():
    command = re.search(r"uv run python packages/rl-train-fsdp/(benchmarks/\S+) tiny", TEXT)
    script = Path(__file__).parents[1] / command[1]
    short = [sys.executable, str(script), "tiny", "--samples", "4", "--steps", "1", "--ranks", "1"]
    done = subprocess.run(short, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"log_prob_s=\d\.\d{3} update_s=\d\.\d{3} stream_s=\d\.\d{3}", done.stdout)
