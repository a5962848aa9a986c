"""A pytest hook that counts what the contracts skipped.

In a `conftest.py`: `from rl_core.testing.summary import pytest_terminal_summary`.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any

from rl_core.testing.contract import SKIP_PREFIX

if TYPE_CHECKING:
    import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write one line for each reason, with the number of tests it skipped."""
    counts = skipped(terminalreporter.stats.get("skipped", []))
    if not counts:
        return
    terminalreporter.section("contract tests skipped")
    for (where, reason), number in sorted(counts.items()):
        terminalreporter.write_line(f"{number:4d}  {where}: {reason}")


def skipped(reports: "list[pytest.TestReport]") -> Counter[tuple[str, str]]:
    """Numbers of skipped contract tests by (test class, reason)."""
    counts: Counter[tuple[str, str]] = Counter()
    for report in reports:
        text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        _, prefix, reason = text.partition(SKIP_PREFIX)
        if prefix:
            counts[report.nodeid.rpartition("::")[0].rpartition("::")[2], reason] += 1
    return counts
