"""Kill one member at each point of a sync, over every transport, and print how the run ended.

    uv run tools/kill_members.py [TRANSPORT ...] [MEMBER ...] [POINT ...]

Transports: fused, hccl, mooncake, disk (the engine loads the directory), disk_verified (leases of
what was read and compared with its digests). Members and points: those of `tools/dying_run.py`.

For each combination: seconds from the death to the end of the run, exit code, what it left, and
the cause that the run printed. Exit code 1 unless each member died before the sync was published
and its run ended within 30 s with exit code 1 and a line that names the dead, and left no process,
temporary file or shared memory behind. (A rank that has done its part may die without harm to the
sync; the run then ends when it is asked again.)
"""

import itertools
import math
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import pytest
from whole_runs import ENDED_S, Runner

DYING = Path(__file__).with_name("dying_run.py").resolve()
LIMIT_S = 200

SEPARATE = "config=separate"
TRANSPORTS = {
    "fused": (),
    "hccl": (SEPARATE, "checkpoint_engine.backend=hccl"),
    "mooncake": (SEPARATE, "checkpoint_engine.backend=mooncake"),
    "disk": (SEPARATE, "checkpoint_engine.backend=disk"),
    "disk_verified": (
        SEPARATE,
        "checkpoint_engine.backend=disk",
        "checkpoint_engine.debug.verify_light_transfer=true",
    ),
}
"""Arguments of the runs."""

MEMBERS = {
    "actor_0": "actor rank 0 died",
    "actor_1": "actor rank 1 died",
    "checkpoint_worker": "checkpoint_worker rank 0 died",
    "engine": "the engine died",
    "server": r"replica 0\.\w+ died",
}
"""What the cause must say of a member that was killed, as a regular expression."""

POINTS = ("prepare", "midway", "end", "loading")


class Death:
    """A run in which one member is killed in its second sync, and how it ended.

    Attributes:
        run: the run, ended.
        seconds: from the death to the end; infinite if nobody died.
        late: whether the sync had been published before.
        left: what outlived the run.
    """

    def __init__(
        self, runner: Runner, transport: str, member: str, point: str, directory: Path
    ) -> None:
        moment = directory / "moment"
        self.run = runner.start(
            f"{member}:{point}",
            str(moment),
            *TRANSPORTS[transport],
            f"checkpoint_engine.root_dir={directory / 'exchange'}",
            "trainer.total_training_steps=4",
            "checkpoint_engine.update_weights_bucket_megabytes=1",
            "data.eval_size=0",
            program=DYING,
        ).finish(LIMIT_S)
        self._obituary = MEMBERS[member]
        died, published = _time(moment), _time(directory / "moment.published")
        self.seconds = time.time() - died if moment.exists() else math.inf
        self.late = published < died
        self.left = self.run.left()

    @property
    def causes(self) -> list[str]:
        """What the run says it ended of."""
        return [line for line in self.run.lines if "Run failed" in line]

    @property
    def ended_well(self) -> bool:
        """As the module says."""
        named = len(self.causes) == 1 and re.search(self._obituary, self.causes[0]) is not None
        in_time = not self.late and self.seconds <= ENDED_S
        return named and in_time and self.run.code == 1 and not self.left

    def __str__(self) -> str:
        late = " (died after the sync)" if self.late else ""
        how = f"{self.seconds:5.1f} s{late}, code {self.run.code}, left {self.left}"
        return f"{how}: {self.causes}"


def _time(path: Path) -> float:
    """What is written there; never, if nothing is."""
    return float(path.read_text()) if path.exists() else math.inf


def main() -> int:
    """Exit code 1 if any run ended badly."""
    good = True
    known = [list(TRANSPORTS), list(MEMBERS), list(POINTS)]
    words = sys.argv[1:]
    if unknown := set(words).difference(*known):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known are {known}")
    chosen = [[name for name in names if name in words] or names for names in known]
    for transport, member, point in itertools.product(*chosen):
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
            sys.stdout.write(f"{transport:13} {member:17} {point:8} {line}\n")
            sys.stdout.flush()
            runner.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
