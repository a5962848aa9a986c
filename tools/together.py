"""All distributions in one environment."""

import re
import shutil
from pathlib import Path

from alone import EXTRAS, OVERRIDES
from distributions import Distribution, DistributionError
from fresh_environment import Environment, run
from test_packages import ROOT

EVERYTHING = """
import minirl.task_runner, mooncake.engine, sglang, vllm
from importlib.metadata import entry_points
from rl_core.plugins import CHECKPOINT_ENGINES, ROLLOUT_BACKENDS, TRAIN_ENGINES, load_backend
for group in (CHECKPOINT_ENGINES, ROLLOUT_BACKENDS, TRAIN_ENGINES):
    for entry in entry_points(group=group):
        load_backend(group, entry.name)
"""


def check_wheels(items: list[Distribution], directory: Path) -> None:
    """The wheels, with the extras for the CPU."""
    place = directory / "wheels"
    environment = Environment(place, directory / "constraints.txt")
    wheels = [item.requirement(EXTRAS.get(item.name)) for item in items]
    environment.install(*wheels, overrides=OVERRIDES)
    _check(items, environment)
    shutil.rmtree(place)


def check_readme_line(items: list[Distribution], directory: Path) -> None:
    """The line of the README, in the checkout."""
    [line] = re.findall(r"^uv pip install .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    place = directory / "readme"
    environment = Environment(place, directory / "constraints.txt")
    run("bash", "-c", f"{line} --python {environment.python}", cwd=ROOT)
    _check(items, environment)
    shutil.rmtree(place)


def _check(items: list[Distribution], environment: Environment) -> None:
    missing = {item.name for item in items} - environment.versions().keys()
    if missing:
        raise DistributionError(f"{sorted(missing)} are not installed")
    environment.execute(EVERYTHING)
    environment.script("minirl", "version")
