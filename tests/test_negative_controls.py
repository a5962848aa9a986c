"""If the samples came from anywhere but the synced engine, these runs would learn as well."""

import pytest

pytestmark = pytest.mark.engine

STEPS = 30


def test_with_a_learning_rate_of_zero_nothing_is_learned(runner):
    run = runner.complete(
        "actor.optimizer_config.lr=0", f"trainer.total_training_steps={STEPS}", "data.eval_size=0"
    )
    assert run.code == 0, run.log
    assert all(line["reward/mean"] <= 0.3 for line in run.metrics)
    digests = {sync["weights_digest"] for sync in run.summary["syncs"]}
    assert len(digests) == 1


def test_without_syncs_after_the_first_the_trainer_moves_and_the_samples_do_not(runner, tmp_path):
    hook = tmp_path / "sitecustomize.py"
    hook.write_text("")
    run = runner.complete(
        f"trainer.total_training_steps={STEPS}", "data.eval_size=0", "rollout.free_cache_engine=false"
    )
    assert run.code == 0, run.log
