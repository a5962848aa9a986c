"""After syncs, the engine serves exactly the weights that the trainer saves.

Each kind of model, both sizes and every way of the weights once; tools/served_weights.py runs all
kinds and sizes in fused mode.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from witnesses import SERVED, TOLERANCE

pytestmark = [pytest.mark.engine, pytest.mark.xdist_group("witnessed")]

SCRIPT = Path(__file__).parent / "witnesses.py"
RUNS = ["fused", "hccl", "mooncake", "disk", "sglang"]
SAVED = Path("checkpoints") / "final"


@pytest.fixture(scope="module")
def testimonies(witnessed_runs):
    """What the witnesses answer on the model that each run saved."""
    directories = [str(witnessed_runs[name].run_dir / SAVED) for name in RUNS]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *directories],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return dict(zip(RUNS, found.values(), strict=True))


def check_same(mine, theirs, witness):
    for (my_tokens, my_log_probs), (tokens, log_probs) in zip(mine, theirs, strict=True):
        assert my_tokens == tokens, witness
        assert my_log_probs == pytest.approx(log_probs, abs=TOLERANCE), witness


@pytest.mark.parametrize("name", ["fused", "sglang"])
def test_two_ranks_sample_and_train_alike(witnessed_runs, name):
    run = witnessed_runs[name]
    assert run.code == 0, run.log
    assert run.left() == []
    for line in run.metrics:
        assert line["rollout_train_logprob_diff/mean"] <= 1e-5
        assert line["rollout_train_logprob_diff/max"] <= 1e-4


@pytest.mark.parametrize("name", RUNS)
def test_each_sync_tells_of_its_verification(witnessed_runs, name):
    run = witnessed_runs[name]
    for index, phase in enumerate(("initial", *["trained"] * 3), start=1):
        started = f"Weight sync started: sync_index={index}, phase={phase}, "
        finished = f"Weight sync finished: sync_index={index}, phase={phase}, "
        run.tells_in_order([started, "Light transfer verification passed: matched=", finished])


@pytest.fixture(params=RUNS)
def told(request, witnessed_runs):
    """Name of a run, and what its engine answered."""
    run = witnessed_runs[request.param]
    assert run.code == 0, run.log
    return request.param, json.loads((run.run_dir / SERVED).read_text())


def test_three_witnesses_agree(told, testimonies):
    name, answers = told
    for witness, testimony in testimonies[name].items():
        check_same(answers["served"], testimony, witness)


def test_a_byte_changed_on_the_way_stops_the_publish(told):
    _, answers = told
    tampered = answers["tampered"]
    assert tampered["tensor"]
    assert f"tensor '{tampered['tensor']}'" in tampered["error"], tampered
    assert "fenced" in tampered["refusal"]
    check_same(answers["repaired"], answers["served"], "itself, before")
