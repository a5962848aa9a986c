"""If the samples came from anywhere but the synced engine, these controls would learn as well.

A run without a learning rate, one without syncs, and a healthy one of the same length, one after
the other in one run of `phased_run.py`: what differs between them is one switch, and what is
common to them is everything else. Many syncs in a row follow, and the run is ended in the middle
of its loop, one by a signal, one by the death of its engine.
"""

import json
import signal
from pathlib import Path

import pytest
from endings import interrupt, kill_engine
from phases import FROZEN, HEALTHY, HOLDINGS, STEPS, SYNCS, UNSYNCED
from whole_runs import Runner

from rl_core.versions import PolicyVersion

pytestmark = pytest.mark.engine

TESTS = Path(__file__).parent
UNTRAINED, TRAINED = 0.3, 0.8


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def run(engine, tmp_path_factory):
    """A run that has gone through its phases and its many syncs, and goes on."""
    runner = Runner(tmp_path_factory.mktemp(engine))
    run = runner.start(
        f"rollout.name={engine}",
        f"trainer.total_training_steps={STEPS}",
        f"reward.path={TESTS / 'digits_reward.py'}",
        "actor.optimizer_config.lr_scheduler_type=constant",
        "actor.optimizer_config.warmup_steps=0",
        "algorithm.ppo_mini_batch_size=64",
        "checkpoint_engine.debug.verify_light_transfer=true",
        "data.eval_size=0",
        program=TESTS / "phased_run.py",
    )
    run.wait_for(f"[Step {STEPS + SYNCS[engine] + 1}/", 400)
    yield run
    runner.close()


def test_its_end_leaves_nothing(engine, run):
    """The first of these tests: what the others look at is complete when the run has ended."""
    if engine == "vllm":
        interrupt(run, signal.SIGINT)
    else:
        kill_engine(run)


def test_only_an_engine_that_is_trained_and_synced_gives_better_samples(run):
    frozen, unsynced, healthy = (
        [run.metrics[step - 1] for step in phase] for phase in (FROZEN, UNSYNCED, HEALTHY)
    )
    syncs = run.summary["syncs"]
    syncs = [sync for sync in syncs if PolicyVersion.parse(sync["version"]).step <= STEPS]
    check_frozen(run, frozen, syncs)
    check_unsynced(run, unsynced)
    check_healthy(run, healthy, syncs)


def check_frozen(run, lines, syncs):
    """Synced in every step, never changed, nothing learned."""
    assert {line["lr"] for line in lines} == {0}
    assert [line["policy_version"] for line in lines] == [f"e1.s{step - 1}" for step in FROZEN]
    assert all(line["reward/mean"] <= UNTRAINED for line in lines)
    digests = {sync["weights_digest"] for sync in syncs[: len(FROZEN) + 1]}
    assert len(digests) == 1
    assert None not in digests


def check_unsynced(run, lines):
    """The policy moves away; the samples are those of the policy that was synced last."""
    assert all(line["lr"] > 0 for line in lines)
    served = f"e1.s{FROZEN[-1]}"
    assert {line["policy_version"] for line in lines} == {served}
    samples = [item for item in run.trajectories if item["index"] // 256 + 1 in UNSYNCED]
    assert {span[0] for item in samples for span in item["policy_version_spans"]} == {served}
    assert all(line["reward/mean"] <= UNTRAINED for line in lines)
    differences = [line["rollout_train_logprob_diff/mean"] for line in lines]
    assert differences[0] <= 1e-5
    assert min(differences[1:]) > 1e-2
    assert differences[-1] > 2 * differences[1]


def check_healthy(run, lines, syncs):
    """The first sync brings what was learned meanwhile, and learning goes on."""
    assert [line["policy_version"] for line in lines] == [f"e1.s{step - 1}" for step in HEALTHY]
    assert all(line["reward/mean"] > UNTRAINED for line in lines)
    assert lines[-1]["reward/mean"] >= TRAINED
    assert all(line["rollout_train_logprob_diff/mean"] <= 1e-5 for line in lines)
    # The last one of the frozen weights, then a new set in every sync.
    digests = [sync["weights_digest"] for sync in syncs[len(FROZEN) :]]
    assert len(digests) == len(set(digests)) == len(HEALTHY) + 2


def test_many_syncs_leave_memory_files_and_shared_memory_as_they_were(run):
    before, after = json.loads((run.run_dir / HOLDINGS).read_text())
    assert after["processes"] == before["processes"]
    assert after["threads"] <= before["threads"] + 10  # Ray's pools breathe
    assert after["files"] <= before["files"]
    assert after["orphans"] <= before["orphans"]
    assert after["shared_memory"] <= before["shared_memory"]
    # A leak of one bucket a sync would be 400 MB.
    assert after["memory"] - before["memory"] <= 40e6
