"""The pytest plugin that rl-core installs: contract tests are counted, modules stay together.

Loaded by entry point (`pytest11`) wherever rl-core is installed; it changes no test.
"""

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from rl_core.testing.contract import SKIP_PREFIX, Contract

_PROPERTY = "contract"
_GROUP = "xdist_group"
_MARKERS = (
    "xdist_group(name): tests that one worker runs; the module, unless something else is set",
    "engine: starts a real rollout engine or several processes",
)


def pytest_configure(config: pytest.Config) -> None:
    """Announce the markers of the contracts' tests, for runs without a configuration of ours."""
    for line in _MARKERS:
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note which contract a test belongs to, and keep the tests of a module on one worker."""
    for item in items:
        cls = getattr(item, "cls", None)
        if cls is not None and issubclass(cls, Contract):
            item.user_properties.append((_PROPERTY, cls.__name__))
        if item.get_closest_marker(_GROUP) is None:
            name = f"{item.path.parent.parent.name}:{item.path.stem}"
            item.add_marker(pytest.mark.xdist_group(name))
        group = item.get_closest_marker(_GROUP)
        item.user_properties.append((_GROUP, group.args[0] if group and group.args else ""))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Take off what pytest-xdist added: `--last-failed` knows a test by its own name."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # there the names have to stay as they were handed out
    group = dict(report.user_properties).get(_GROUP)
    report.nodeid = report.nodeid.removesuffix(f"@{group}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each contract with its counts, and one for each reason to skip."""
    passed, skipped = counts(terminalreporter.stats)
    failed = _by_class(
        [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    )
    names = sorted(passed.keys() | failed.keys() | {name for name, _ in skipped})
    if not names:
        return
    terminalreporter.section("contracts")
    for name in names:
        reasons = {reason: number for (of, reason), number in skipped.items() if of == name}
        total = sum(reasons.values())
        bad = f", {failed[name]} failed" if failed[name] else ""
        terminalreporter.write_line(f"{passed[name]:4d} passed{bad}, {total:2d} skipped  {name}")
        for reason, number in sorted(reasons.items()):
            terminalreporter.write_line(f"{number:17d} skipped  {reason}")


def counts(
    stats: dict[str, list[pytest.TestReport]],
) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Passed contract tests by class, and skipped ones by (class, reason)."""
    passed = _by_class(report for report in stats.get("passed", []) if report.when == "call")
    skipped: Counter[tuple[str, str]] = Counter()
    for report in stats.get("skipped", []):
        name = _contract(report)
        text = str(report.longrepr[2]) if isinstance(report.longrepr, (tuple, list)) else ""
        _, prefix, reason = text.partition(SKIP_PREFIX)
        if prefix and name is not None:
            skipped[name, reason] += 1
    return passed, skipped


def _by_class(reports: Iterable[pytest.TestReport]) -> Counter[str]:
    names = (_contract(report) for report in reports)
    return Counter(name for name in names if name is not None)


def _contract(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Contract that a report is about; a module that was skipped or not collected has none."""
    name = dict(getattr(report, "user_properties", ())).get(_PROPERTY)
    return name if isinstance(name, str) else None
