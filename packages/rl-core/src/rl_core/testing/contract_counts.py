"""Pytest hooks that say how many checks of each contract ran, and what was skipped and why.

In a `conftest.py`:

```python
from rl_core.testing.contract_counts import pytest_collection_modifyitems, pytest_terminal_summary
```
"""

from collections import Counter
from typing import Any

import pytest

from rl_core.testing.contract import Contract
from rl_core.testing.summary import skipped

_ENDS = ("passed", "failed", "error", "skipped")
_CONTRACTS = pytest.StashKey[dict[str, str]]()
_WRITTEN = pytest.StashKey[bool]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remember which tests belong to which contract class."""
    found = config.stash.setdefault(_CONTRACTS, {})
    for item in items:
        cls = getattr(item, "cls", None)
        if isinstance(cls, type) and issubclass(cls, Contract):
            found[item.nodeid] = cls.__name__


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write one line for each contract class, and one for each reason to skip."""
    contracts = config.stash.get(_CONTRACTS, {})
    # Several conftest files may import these hooks; one run has one summary.
    if not contracts or config.stash.get(_WRITTEN, False):
        return
    config.stash[_WRITTEN] = True
    counts: Counter[tuple[str, str]] = Counter()
    for end in _ENDS:
        for report in terminalreporter.stats.get(end, []):
            name = contracts.get(getattr(report, "nodeid", ""))
            if name is not None:
                counts[name, end] += 1
    terminalreporter.section("contracts")
    for name in dict.fromkeys(contracts.values()):
        ends = [f"{counts[name, end]} {end}" for end in _ENDS if counts[name, end]]
        terminalreporter.write_line(f"{name}: {', '.join(ends) or 'not run'}")
    reasons = skipped(terminalreporter.stats.get("skipped", []))
    for (where, reason), number in sorted(reasons.items()):
        terminalreporter.write_line(f"{number:4d} skipped  {where}: {reason}")
