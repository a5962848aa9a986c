"""Memory that is free for a run: the machine's, or what its container leaves of it."""

from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Of control groups, second and first version: limit, use, details, and whose pages can go."""


def available_memory() -> int:
    """Bytes that new processes can take."""
    free = int(psutil.virtual_memory().available)
    group = group_limit()
    return free if group is None else min(free, group[1])


def group_limit(groups: Path = GROUPS) -> tuple[int, int] | None:
    """Bytes that the control group of this process may take, and those left; None: no limit.

    Pages of files that nobody needs now count as left: the kernel gives them up first.

    Args:
        groups: where control groups are mounted; a container sees its own there.
    """
    for limit_name, used_name, details_name, cached_name in _FILES:
        try:
            limit = (groups / limit_name).read_text().strip()
            used = int((groups / used_name).read_text())
            details = (groups / details_name).read_text().splitlines()
            cached = int(dict(line.split() for line in details)[cached_name])
        except (OSError, ValueError, LookupError):
            continue
        # Without a limit the second version says "max", the first a number beyond all memory.
        if limit.isdigit() and int(limit) < psutil.virtual_memory().total:
            return int(limit), max(0, int(limit) - used + cached)
    return None
