"""Kill one member at each point of a sync, over every transport, and print how the run ended.

    uv run tools/kill_members.py [fused|hccl|mooncake|disk ...] [actor|checkpoint_worker|engine ...]

For each combination: seconds from the death to the end of the run, exit code, what it left, and
the cause that the run printed. Exit code 1 unless each run ended within 30 s with exit code 1 and a
line that names the dead, and left no process, temporary file or shared memory behind.
"""

import itertools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import pytest
from whole_runs import Death, Runner

MEMBERS = ("actor", "checkpoint_worker", "engine")
POINTS = ("prepare", "midway", "end", "loading")
TRANSPORTS = ("fused", "hccl", "mooncake", "disk")


def main() -> int:
    """Exit code 1 if any run ended badly."""
    good = True
    transports = [word for word in sys.argv[1:] if word in TRANSPORTS] or TRANSPORTS
    members = [word for word in sys.argv[1:] if word in MEMBERS] or MEMBERS
    for transport, member, point in itertools.product(transports, members, POINTS):
        if transport == "fused" and member == "checkpoint_worker":
            continue
        with tempfile.TemporaryDirectory() as directory:
            runner = Runner(Path(directory))
            try:
                death = Death(runner, transport, member, point, Path(directory))
            except pytest.fail.Exception as hang:
                good, line = False, f"BAD {hang}"
            else:
                good = good and death.ended_well
                line = f"{'ok ' if death.ended_well else 'BAD'} {death}"
            sys.stdout.write(f"{transport:9} {member:18} {point:8} {line}\n")
            sys.stdout.flush()
            runner.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
