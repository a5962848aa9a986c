"""If the samples came from anywhere but the synced engine, these controls would learn as well.

A run without a learning rate, one without syncs, and a healthy one of the same length, one after
the other in one run of `phased_run.py`: what differs between them is one switch, and what is
common to them is everything else. And many syncs in a row leave nothing behind.
"""

import json
from pathlib import Path

import pytest
from phases import FROZEN, HEALTHY, HOLDINGS, STEPS, SYNCS, UNSYNCED

pytestmark = pytest.mark.engine

TESTS = Path(__file__).parent
UNTRAINED, TRAINED = 0.3, 0.8


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_only_an_engine_that_is_trained_and_synced_gives_better_samples(runner, engine):
    run = runner.complete(
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
    assert run.code == 0, run.log
    frozen, unsynced, healthy = (
        [run.metrics[step - 1] for step in phase] for phase in (FROZEN, UNSYNCED, HEALTHY)
    )
    syncs = run.summary["syncs"][: -SYNCS[engine]]
    check_frozen(run, frozen, syncs)
    check_unsynced(run, unsynced)
    check_healthy(run, healthy, syncs)
    check_holdings(*json.loads((run.run_dir / HOLDINGS).read_text()))


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


def check_holdings(before, after):
    """Many syncs leave memory, open files and shared memory as they were."""
    assert after["processes"] == before["processes"]
    assert after["threads"] <= before["threads"] + 10  # Ray's pools breathe
    assert after["files"] <= before["files"]
    assert after["orphans"] <= before["orphans"]
    assert after["shared_memory"] <= before["shared_memory"]
    # A leak of one bucket a sync would be 400 MB.
    assert after["memory"] - before["memory"] <= 40e6
