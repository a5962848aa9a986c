"""After syncs, the engine serves exactly the weights that the trainer saves.

Each kind of model, both sizes and every way of the weights once; tools/served_weights.py runs all
kinds and sizes in fused mode.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from witnesses import FLIPPED, ONE_AT_FIRST, SERVED, TOLERANCE

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
    engine = "SGLang" if name == "sglang" else "vLLM"
    rounds = [["trained"], ["perturbed", "trained"]][name == "fused"] * 3
    if ONE_AT_FIRST in run.arguments:
        rounds.insert(1, "joining")
    phases = ["initial", *rounds]
    for index, phase in enumerate(phases, start=1):
        replica = 1 if phase == "joining" else 0
        run.tells_in_order(
            [
                f"Weight sync started: sync_index={index}, phase={phase}, ",
                "Light transfer verification passed: matched=",
                f"{engine} strict runtime weight verification started: replica={replica}, ",
                f"{engine} rollout strict runtime weight verification passed: tensors=",
                f"Weight sync finished: sync_index={index}, phase={phase}, ",
            ]
        )
    for sync in run.summary["syncs"][: len(phases)]:
        counts = dict(sync["live"])
        assert counts.pop("matched") > 0
        assert not any(counts.values()), sync
        assert 0 < sync["phases"]["verify_live"] < sync["seconds"]


def test_perturbed_weights_were_in_the_engine_and_the_samples_are_not_theirs(witnessed_runs):
    """That they are those of the trainer's own weights, the log-probs and the witnesses show."""
    run = witnessed_runs["fused"]
    syncs = run.summary["syncs"][1:7]
    assert [sync["version"] for sync in syncs] == [f"e1.s{step}" for step in range(1, 7)]
    for changed, restored in zip(syncs[::2], syncs[1::2], strict=True):
        differ, again = changed["perturbation"]["differ"], restored["perturbation"]["restored"]
        assert differ == again > 0
        assert changed["weights_digest"] != restored["weights_digest"]
    served = {span[0] for item in run.trajectories for span in item["policy_version_spans"]}
    assert served == {"e1.s0", "e1.s2", "e1.s4"}


@pytest.fixture(params=RUNS)
def told(request, witnessed_runs):
    """Name of a run, and what its engine answered."""
    run = witnessed_runs[request.param]
    assert (run.run_dir / SERVED).exists(), run.log
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


def test_a_bit_flipped_in_the_engine_stops_the_publish(told, witnessed_runs):
    name, answers = told
    flipped = answers["flipped"]
    assert f"on rank {flipped['rank']}: {FLIPPED!r}" in flipped["error"], flipped
    assert "fenced" in flipped["refusal"]
    [failed] = [s for s in witnessed_runs[name].summary["syncs"] if s["error"] == flipped["error"]]
    assert failed["live"]["mismatched"] == 1
    [report] = failed["live_reports"]
    [bad] = json.loads((Path(report) / "summary.json").read_text())["bad"]
    assert (bad["name"], bad["tp_rank"]) == (FLIPPED, flipped["rank"])
    assert all("self_attn" in part for part in bad["slices"])
    element = bad["first_difference"][0] * bad["shape"][1] + bad["first_difference"][1]
    size = bad["shape"][0] * bad["shape"][1]
    assert element == round(0.5 * (4 * size - 1)) // 4
