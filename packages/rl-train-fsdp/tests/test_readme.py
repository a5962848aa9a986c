"""The README's program and its claims about options."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

from rl_train_fsdp.config import FsdpConfig

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_program_runs(save_model, make_config, free_port, tmp_path):
    path = save_model(tmp_path / "model", make_config("tied"))
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(free_port())],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "model.embed_tokens.weight (61, 32) float32" in done.stdout
    assert (tmp_path / "model-trained" / "model.safetensors").is_file()


def test_the_options_exist():
    sections = {item.name: item.type for item in dataclasses.fields(FsdpConfig)}
    for section, key in re.findall(r"\| `(\w+)\.(\w+)` \|", README):
        assert key in {item.name for item in dataclasses.fields(sections[section])}
