"""Runs of the app that several tests look at."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # modules that tests share

from whole_runs import Run, Runner, WitnessedRuns


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    made = Runner(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`minirl` without any argument, from start to end."""
    made = Runner(tmp_path_factory.mktemp("default"))
    yield made.complete()
    made.close()


@pytest.fixture(scope="session")
def witnessed_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WitnessedRuns]:
    made = WitnessedRuns(tmp_path_factory.mktemp("witnessed"))
    yield made
    made.close()
