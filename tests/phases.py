"""Which steps of `phased_run.py` belong to which of its phases."""

LENGTH = 5

FROZEN = range(1, LENGTH + 1)
UNSYNCED = range(LENGTH + 1, 2 * LENGTH + 1)
HEALTHY = range(2 * LENGTH + 1, 3 * LENGTH + 1)
STEPS = HEALTHY[-1]
