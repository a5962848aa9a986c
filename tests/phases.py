"""What `phased_run.py` and its test agree on: the steps of each phase, and what follows them."""

LENGTH = 5

FROZEN = range(1, LENGTH + 1)
UNSYNCED = range(LENGTH + 1, 2 * LENGTH + 1)
HEALTHY = range(2 * LENGTH + 1, 3 * LENGTH + 1)
STEPS = HEALTHY[-1]

SYNCS = {"vllm": 100, "sglang": 20}
"""Syncs in a row after the last phase."""

HOLDINGS = "holdings.json"
"""What the processes held before and after them."""
