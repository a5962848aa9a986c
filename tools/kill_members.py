"""Kill one member at each point of a sync, over every transport, and print how the run ended.

    uv run tools/kill_members.py [fused|hccl|mooncake|disk ...]

For each combination: seconds from the death to the end of the run, exit code, processes left, and
the cause that the run printed. Exit code 1 if a run did not end within 30 s with exit code 1, or
left a process behind.
"""

import itertools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from whole_runs import Death, Runner

MEMBERS = ("actor", "checkpoint_worker", "engine")
POINTS = ("prepare", "midway", "end", "loading")
TRANSPORTS = ("fused", "hccl", "mooncake", "disk")


def main() -> int:
    """Exit code 1 if any run ended badly."""
    good = True
    wanted = sys.argv[1:] or TRANSPORTS
    for transport, member, point in itertools.product(wanted, MEMBERS, POINTS):
        if transport == "fused" and member == "checkpoint_worker":
            continue
        with tempfile.TemporaryDirectory() as directory:
            runner = Runner(Path(directory))
            death = Death(runner, transport, member, point, Path(directory))
            good = good and death.ended_well
            sys.stdout.write(f"{transport:9} {member:18} {point:8} {death}\n")
            sys.stdout.flush()
            runner.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
