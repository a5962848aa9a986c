"""If the samples came from anywhere but the synced engine, these runs would learn as well."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from minirl.tiny_model import ensure_tiny_model

pytestmark = pytest.mark.engine

STEPS = 24
SHORT = (
    f"trainer.total_training_steps={STEPS}",
    # As long as this at a constant rate, and a healthy run is far above 0.3 (README of the app).
    "actor.optimizer_config.lr_scheduler_type=constant",
    "data.eval_size=0",
)
VERIFIED = "checkpoint_engine.debug.verify_light_transfer=true"


def trained_differs(run):
    """Whether the saved policy is another one than the run started from."""
    start = load_file(ensure_tiny_model() / "model.safetensors")
    end = load_file(run.run_dir / "checkpoints" / "final" / "model.safetensors")
    assert start.keys() == end.keys()
    return any((start[name] != end[name]).any() for name in start)


def test_with_a_learning_rate_of_zero_nothing_is_learned(runner):
    run = runner.complete("actor.optimizer_config.lr=0", VERIFIED, *SHORT)
    assert run.code == 0, run.log
    assert all(line["reward/mean"] <= 0.3 for line in run.metrics)
    digests = {sync["weights_digest"] for sync in run.summary["syncs"]}
    assert len(digests) == 1
    assert None not in digests
    assert not trained_differs(run)


def test_without_syncs_after_the_first_the_policy_moves_but_the_samples_do_not(runner):
    run = runner.complete(
        "rollout.free_cache_engine=false",
        *SHORT,
        program=Path(__file__).parent / "suppressed_syncs.py",
    )
    assert run.code == 0, run.log
    assert all(line["reward/mean"] <= 0.3 for line in run.metrics)
    assert trained_differs(run)
    differences = [line["rollout_train_logprob_diff/mean"] for line in run.metrics]
    assert differences[0] <= 1e-5
    assert differences[-1] > 1e-2
    assert {span[0] for item in run.trajectories for span in item["policy_version_spans"]} == {
        "e1.s0"
    }
