"""Compare generation after many weight syncs with generation after the first, in one engine each.

    uv run tools/generation_speed.py
    uv run tools/generation_speed.py sglang --cycles 20 --rounds 100

Two replicas of an engine run side by side with the embedded model. Both are given weights once;
then one of them goes through N cycles of release, resume, sync and a short generation. After that
both complete the same seeded batches, turn by turn, so that what else the machine does falls on
both alike. Reported are the median of the seconds and the mean of the CPU seconds of the replica's
processes (which the kernel counts in hundredths), over the rounds in which nothing else used more
than a twentieth of the machine (over all, if those are few), and what the cycled replica's
processes hold before and after (PSS). `--cycles 0` tells how much two fresh ones differ.

Exit code 1 if the CPU seconds differ by more than 10 % or memory grew by more than 16 MB.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Before torch is imported: compute threads of two replicas share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import psutil
from safetensors.torch import load_file

from minirl.tiny_model import ensure_tiny_model
from rl_core.interfaces import Placement
from rl_core.plugins import ROLLOUT_BACKENDS, load_backend, load_object
from rl_core.testing.launcher import ProcessLauncher
from rl_core.testing.started_replica import StartedReplica
from rl_core.testing.weight_set import WeightSet
from rl_core.trajectory import GenerateRequest, SamplingParams

ENGINES = ("vllm", "sglang")
TAGS = ("kv_cache", "weights")
REQUESTS, TOKENS = 256, 8  # the default run's step
SETTLED = 4
CALL_S = 300.0
QUIET = 0.05
FEW = 5
SPEED_LIMIT, MEMORY_LIMIT = 0.10, 16e6


@dataclass(frozen=True)
class Cost:
    """What a batch took.

    Attributes:
        seconds: until all completions were there.
        cpu: seconds of CPU time of the replica's processes.
        others: share of all cores that anything else used meanwhile.
    """

    seconds: float
    cpu: float
    others: float


class Measured:
    """A running replica and its processes."""

    def __init__(self, engine: str, model: Path, log_dir: Path, rank: int) -> None:
        backend = load_backend(ROLLOUT_BACKENDS, engine)
        config = load_object(backend.config_cls)(
            local_path=str(model), dtype="float32", bucket_megabytes=64, log_dir=str(log_dir)
        )
        replica_cls = load_object(backend.replica)
        replica = replica_cls(config, ProcessLauncher(log_dir), Placement(replica_rank=rank))
        self.started = StartedReplica(backend, replica, config)
        self.weights = WeightSet(load_file(model / "model.safetensors"))
        server = psutil.Process(self.started.state()["pid"])
        self._processes = [server, *server.children(recursive=True)]
        self.started.sync(self.weights)

    def cycle(self, count: int) -> None:
        """Release, resume, sync and use, `count` times."""
        adapter = self.started.adapters[0]
        for number in range(count):
            adapter.release(TAGS, CALL_S)
            adapter.resume(TAGS, CALL_S)
            self.started.sync(self.weights)
            self.generate(-1 - number, requests=8)

    def generate(self, number: int, requests: int = REQUESTS) -> Cost:
        """Complete batch `number` and tell what it cost."""
        batch = [
            GenerateRequest(
                f"{number}.{index}",
                [6 + index % 90, 7, 8, 9],
                SamplingParams(max_tokens=TOKENS, seed=index, ignore_eos=True),
            )
            for index in range(requests)
        ]
        begun, own, all_of_it = time.perf_counter(), self._cpu(), _busy()
        self.started.adapters[0].generate(batch, CALL_S)
        seconds, cpu = time.perf_counter() - begun, self._cpu() - own
        mine = cpu + 0.1 * seconds  # this process waits, and reads the answers
        others = max(0.0, _busy() - all_of_it - mine)
        return Cost(seconds, cpu, others / seconds / psutil.cpu_count())

    def memory(self) -> int:
        """PSS of the server and the engine's processes."""
        return sum(process.memory_full_info().pss for process in self._processes)

    def _cpu(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(item.user + item.system for item in times)


def _busy() -> float:
    """CPU seconds that all processes of the machine have used."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


@contextlib.contextmanager
def replicas(engine: str, directory: Path) -> Iterator[tuple[Measured, Measured]]:
    """A replica that stays as it is, and one for the cycles."""
    with contextlib.ExitStack() as stack:
        pair = []
        for rank, name in enumerate(("fresh", "cycled")):
            measured = Measured(engine, ensure_tiny_model(), directory / name, rank)
            stack.callback(measured.started.replica.shutdown, CALL_S)
            pair.append(measured)
        yield pair[0], pair[1]


def compare(engine: str, cycles: int, rounds: int, directory: Path) -> bool:
    """Measure one engine and print its lines; whether speed and memory stayed."""
    with replicas(engine, directory) as (fresh, cycled):
        fresh.generate(0)
        cycled.generate(0)
        settling = min(SETTLED, cycles)
        cycled.cycle(settling)
        before = cycled.memory()
        cycled.cycle(cycles - settling)
        grown = cycled.memory() - before
        pairs = []
        for number in range(1, rounds + 1):
            first, second = (fresh, cycled) if number % 2 else (cycled, fresh)
            costs = {first: first.generate(number), second: second.generate(number)}
            pairs.append((costs[fresh], costs[cycled]))
    return _report(engine, cycles, pairs, grown)


def _report(engine: str, cycles: int, pairs: list[tuple[Cost, Cost]], grown: int) -> bool:
    quiet = [pair for pair in pairs if max(cost.others for cost in pair) <= QUIET]
    counted = quiet if len(quiet) >= FEW else pairs
    change = {}
    for what, middle in (("seconds", statistics.median), ("cpu", statistics.fmean)):
        before, after = (middle([getattr(pair[side], what) for pair in counted]) for side in (0, 1))
        change[what] = after / before - 1
        name = "seconds" if what == "seconds" else "CPU seconds"
        _say(engine, f"{name}: {before:.3f} fresh, {after:.3f} after {cycles} cycles", change[what])
    noisy = "" if counted is quiet else f", only {len(quiet)} of them quiet"
    sys.stdout.write(f"{engine:6}  {len(counted)} of {len(pairs)} rounds counted{noisy}; ")
    sys.stdout.write(f"memory grew by {grown / 1e6:.1f} MB in {max(0, cycles - SETTLED)} cycles\n")
    sys.stdout.flush()
    return abs(change["cpu"]) <= SPEED_LIMIT and grown <= MEMORY_LIMIT


def _say(engine: str, text: str, change: float) -> None:
    sys.stdout.write(f"{engine:6}  {text} ({change:+.1%})\n")


def main() -> int:
    """Exit code 1 if speed or memory did not stay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="*", default=ENGINES, metavar="ENGINE")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    good = True
    for engine in arguments.engines:
        with tempfile.TemporaryDirectory() as directory:
            good &= compare(engine, arguments.cycles, arguments.rounds, Path(directory))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
