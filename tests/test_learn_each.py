"""The tool that lets each algorithm learn the default task knows all of them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

from learn_each import ALGORITHMS, Outcome, row

from minirl.config import load_config
from minirl.plan import make_plan
from minirl.value_checks import CHOICES


def test_every_estimator_and_every_loss_is_run_and_can_be():
    plans = [make_plan(load_config(arguments)) for arguments in ALGORITHMS.values()]
    for key in ("adv_estimator", "loss_mode"):
        used = {getattr(plan.config.algorithm, key) for plan in plans}
        assert used == set(CHOICES[f"algorithm.{key}"])
    assert any(plan.config.algorithm.filter_groups.enable for plan in plans)
    assert any(plan.config.reward.overlong_buffer.enable for plan in plans)
    assert any(plan.config.algorithm.rollout_correction.rollout_is for plan in plans)
    assert any(plan.config.algorithm.kl_coef > 0 for plan in plans)


def test_a_run_that_failed_or_did_not_learn_is_told():
    assert Outcome(0, 0.01, 0.99, (0.0, 1.0), 80.0).learned
    assert not Outcome(0, 0.01, 0.99, (0.0, 0.5), 80.0).learned
    assert not Outcome(1).learned
    assert row("grpo", Outcome(1, seconds=3.0)) == "| grpo | nothing | exit code 1 | | | 3 |"
    learned = row("dapo", Outcome(0, 0.01, 0.99, (0.0, 1.0), 80.0))
    assert learned == "| dapo | `config=dapo` | 0.010 | 0.990 | 0.00 → 1.00 | 80 |"
