"""Measure how fast checkpoint engines move weights, against doing the same by hand.

    uv run tools/bench_transfer.py
    uv run tools/bench_transfer.py --engines hccl --receivers 1 --buckets 64 --rounds 5
    uv run tools/bench_transfer.py --megabytes 64 --rounds 1 --json bench.json     a quick look

One sender and its receivers are processes of this host. Everything is measured in the same
processes, one thing after the other in every round, each round beginning with another one, so that
the noise of the machine falls on all alike; medians and their ratios are reported. A time runs from
the first tensor asked for to the last one handed over, at the slowest receiver; a rate is payload
bytes over that time. Beside it stand the cores that were busy meanwhile, with whatever: use a
machine that does nothing else. Modes:

* `lend`: tensors are handed over, nobody reads them;
* `copy`: the receiver copies each tensor out, as an engine that loads does;
* `verify`: as `copy`, with digests made at the source and recomputed before the copy.

Baselines (`bench_baselines.py`): `naive` packs, broadcasts and copies out bucket by bucket, `raw`
broadcasts without packing, `copied` broadcasts half a bucket while the last one is copied out,
`checked` takes digests at both ends besides (what verification costs by hand), `reads` is
Mooncake's transfer_sync_read, `files` is save, fsync, load and copy out.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from bench_weights import SHAPES

from rl_core.channel import new_key
from rl_core.digests import XXH3_128
from rl_core.interfaces import Placement
from rl_core.plugins import CHECKPOINT_ENGINES, installed
from rl_core.testing.launcher import ProcessLauncher

TIMEOUT_S = 300.0
BASELINES = {
    "hccl": ("naive", "raw", "copied", "checked"),
    "mooncake": ("reads",),
    "disk": ("files",),
}


@dataclass(frozen=True)
class Took:
    """One measurement: wall clock and the CPU time of the machine, in seconds."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        what: engine or baseline.
        mode: `lend`, `copy` or `verify`; empty for a baseline.
        shape: name of the set of tensors.
    """

    what: str
    mode: str
    shape: str

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.mode, self.shape) if part)


class Bench:
    """The processes of one number of receivers and one size of buckets."""

    def __init__(self, arguments: argparse.Namespace, receivers: int, bucket: int) -> None:
        self._arguments = arguments
        self._bucket = bucket
        self._root = tempfile.TemporaryDirectory(dir=arguments.root)
        launcher = ProcessLauncher(Path(self._root.name))
        kwargs = {"megabytes": arguments.megabytes, "bucket_megabytes": bucket}
        self._handles = [
            launcher.launch("bench_rank:BenchRank", {**kwargs, "rank": rank}, {}, Placement())
            for rank in range(receivers + 1)
        ]
        self._version = 0

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.kill()
        self._root.cleanup()

    def measure(self, cases: list[Case]) -> dict[Case, list[Took]]:
        """What every case took in every round."""
        self._connect_baselines()
        key = new_key()
        for name in {case.what for case in cases if case.mode}:
            for kind in (None, XXH3_128):
                self._all("construct", name, kind, key, self._options(name))
        found: dict[Case, list[Took]] = {}
        # One set of weights after the other, as an engine that stays with its model has it: what it
        # allocated for the largest tensor would not survive the other set.
        for shape in SHAPES:
            found |= self._rounds([case for case in cases if case.shape == shape])
        return found

    def _rounds(self, cases: list[Case]) -> dict[Case, list[Took]]:
        """The first round, in which memory is touched for the first time, is not counted."""
        found: dict[Case, list[Took]] = {case: [] for case in cases}
        for counted in range(-1, self._arguments.rounds):
            # A disk that was written to a moment ago is slower: each takes each place in the order.
            first = counted % len(cases)
            for case in (*cases[first:], *cases[:first]):
                os.sync()
                took = self._baseline(case) if not case.mode else self._sync(case)
                if counted >= 0:
                    found[case].append(took)
        return found

    def _options(self, name: str) -> dict[str, str]:
        return {"root_dir": self._root.name} if name == "disk" else {}

    def _connect_baselines(self) -> None:
        port = self._handles[0].call("free_port", timeout=TIMEOUT_S)
        self._all("connect", port, len(self._handles))

    def _baseline(self, case: Case) -> Took:
        if case.what == "reads":
            addresses = self._handles[0].call("serve_reads", case.shape, timeout=TIMEOUT_S)
            self._all("accept_reads", addresses)
        return self._timed(case.what, case.shape, self._root.name)

    def _sync(self, case: Case) -> Took:
        kind = XXH3_128 if case.mode == "verify" else None
        ends = self._all("prepare", case.what, kind)
        self._all("build", case.what, kind, ends)
        self._version += 1
        took = self._timed("move", (case.what, case.mode, case.shape), self._version)
        self._all("finalize", case.what, kind)
        return took

    def _timed(self, method: str, *arguments: Any) -> Took:
        before = _cpu_seconds()
        stamps = self._all(method, *arguments)
        return Took(max(stamps[1:]) - stamps[0], _cpu_seconds() - before)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        pending = [handle.submit(method, *arguments) for handle in self._handles]
        return [call.result(TIMEOUT_S) for call in pending]


def _cpu_seconds() -> float:
    """CPU time of the machine so far: what the kernel does for loopback belongs to no process."""
    spent = psutil.cpu_times()
    return float(sum(spent) - spent.idle - spent.iowait - spent.guest - spent.guest_nice)


def cases_of(engines: list[str]) -> list[Case]:
    """What is measured for these engines: baselines beside what they are compared with."""
    cases = []
    for name in engines:
        for shape in SHAPES:
            cases += [Case(baseline, "", shape) for baseline in BASELINES.get(name, ())]
            cases += [Case(name, mode, shape) for mode in ("lend", "copy", "verify")]
    return list(dict.fromkeys(cases))


def ratios(medians: dict[Case, float]) -> Iterator[tuple[str, float]]:
    """How the speeds compare: speed of the engine over that of its baseline."""
    for case, took in medians.items():
        if case.mode == "copy":
            yield from _against(medians, case, took, ("naive", "files", "reads"))
        if case.mode == "lend":
            yield from _against(medians, case, took, ("raw", "reads"))
        if case.what == "checked":
            yield f"{case} / copied", medians[Case("copied", "", case.shape)] / took
        if case.mode == "verify":
            plain = medians[Case(case.what, "copy", case.shape)]
            yield f"{case} / copy", plain / took


def _against(
    medians: dict[Case, float], case: Case, took: float, baselines: tuple[str, ...]
) -> Iterator[tuple[str, float]]:
    for name in baselines:
        other = medians.get(Case(name, "", case.shape))
        if other is not None and name in BASELINES.get(case.what, ()):
            yield f"{case} / {name}", other / took


def report(
    arguments: argparse.Namespace, receivers: int, bucket: int, found: dict[Case, list[Took]]
) -> dict[str, Any]:
    """Print one table; the same as data."""
    medians = {case: statistics.median(took.wall for took in all_) for case, all_ in found.items()}
    busy = {
        str(case): statistics.median(took.cpu for took in all_) / medians[case]
        for case, all_ in found.items()
    }
    lines = [f"== {receivers} receivers, buckets of {bucket} MiB, {arguments.megabytes} MiB"]
    rates = {str(case): arguments.megabytes / 1024 / took for case, took in medians.items()}
    lines += [
        f"{name:32s} {rate:6.2f} GiB/s {busy[name]:6.2f} cores" for name, rate in rates.items()
    ]
    compared = dict(ratios(medians))
    lines += [f"{name:44s} {ratio:5.2f}" for name, ratio in compared.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    return {
        "receivers": receivers,
        "bucket_megabytes": bucket,
        "gib_per_s": rates,
        "cores": busy,
        "ratios": compared,
        "seconds": {str(case): [took.wall for took in all_] for case, all_ in found.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", default=installed(CHECKPOINT_ENGINES))
    parser.add_argument("--receivers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--buckets", nargs="+", type=int, default=[64, 256], help="in MiB")
    parser.add_argument("--megabytes", type=int, default=1024, help="of weights, in MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--root", default=None, help="directory for files (disk, logs)")
    parser.add_argument("--json", type=Path, help="write everything there")
    arguments = parser.parse_args()
    results = []
    for receivers in arguments.receivers:
        for bucket in arguments.buckets:
            with Bench(arguments, receivers, bucket) as bench:
                found = bench.measure(cases_of(arguments.engines))
            results.append(report(arguments, receivers, bucket, found))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
