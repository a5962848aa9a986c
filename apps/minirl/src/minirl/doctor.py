"""`minirl doctor`: what this machine and this environment have, what they lack, how to get it.

Starts no part of a run and imports no engine.
"""

import contextlib
from collections.abc import Sequence

from minirl.doctor_machine import look_at_machine
from minirl.doctor_packages import look_at_packages
from minirl.findings import MISSING, OK, Finding
from rl_core.errors import ComponentError, ConfigError


def examine(arguments: Sequence[str]) -> list[Finding]:
    """Everything that was found.

    Args:
        arguments: of a run that is planned (`config=... key=value`); with any, the settings, the
            model, the prompts and the reward functions are checked as the run itself would.
    """
    findings = [*look_at_machine(), *look_at_packages()]
    if arguments:
        findings.append(_planned(arguments))
    return findings


def findings_text(findings: Sequence[Finding]) -> str:
    """A line for each, and below it what to do; the last line counts."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:8}{finding.what}")
        if finding.remedy:
            lines.append(f"{'':8}  -> {finding.remedy}")
    missing = sum(1 for finding in findings if finding.state == MISSING)
    verdict = "nothing that a run needs is missing" if not missing else f"{missing} missing"
    return "\n".join([*lines, verdict])


def _planned(arguments: Sequence[str]) -> Finding:
    from minirl.config import load_config
    from minirl.plan import make_plan
    from minirl.task_data import load_task_data

    words = " ".join(arguments)
    try:
        plan = make_plan(load_config(arguments))
        with contextlib.closing(load_task_data(plan).scorer):
            pass
    except (ConfigError, ComponentError) as error:
        return Finding(MISSING, f"a run with {words}", str(error))
    return Finding(
        OK,
        f"a run with {words}: {plan.actor_world} actor ranks, {plan.rollout_world} rollout ranks, "
        f"device {plan.device}",
    )
