"""Separate mode: every checkpoint engine carries weights into a real engine, verified."""

import pytest

pytestmark = pytest.mark.engine

VERIFIED = "checkpoint_engine.debug.verify_light_transfer=true"


@pytest.mark.parametrize("backend", ["hccl", "mooncake", "disk"])
def test_weights_travel_and_are_verified(runner, tmp_path, backend):
    run = runner.complete(
        "config=separate",
        f"checkpoint_engine.backend={backend}",
        f"checkpoint_engine.root_dir={tmp_path / 'exchange'}",
        "trainer.total_training_steps=3",
        "data.eval_size=0",
        VERIFIED,
    )
    assert run.code == 0, run.log
    assert run.processes() == []
    syncs = run.summary["syncs"]
    assert [sync["version"] for sync in syncs] == ["e1.s0", "e1.s1", "e1.s2", "e1.s3"]
    assert {sync["backend"] for sync in syncs} == {backend}
    for line in run.metrics:
        assert line["rollout_train_logprob_diff/mean"] <= 1e-5
        assert line["rollout_train_logprob_diff/max"] <= 1e-4
    if backend != "disk":
        for sync in syncs:
            assert sync["light"]["matched"] > 0
            assert sync["light"]["mismatched"] == 0
        assert len({sync["weights_digest"] for sync in syncs}) == len(syncs)
