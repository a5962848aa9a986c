"""Reports of live verifications: a directory for each, with a file for each rank and a summary."""

import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from minirl.live_comparison import RankComparison, bad_tensors, counts_of
from rl_core.errors import VerificationError

DIRECTORY = "live_weight_digests"
SUMMARY = "summary.json"


class Subject(msgspec.Struct, frozen=True):
    """What a report is about.

    Attributes:
        engine: name of the rollout backend.
        source: how the weights got there: `tensor` in fused mode, else the checkpoint engine; or
            where the expected ones came from.
        replica: number of the replica.
        rollout: first rollout rank of it.
        version: of the weights.
        family: architecture of the model.
    """

    engine: str
    source: str
    replica: int
    rollout: int
    version: str
    family: str


class LiveReports:
    """Writes reports under `<root_dir>/live_weight_digests`, and removes old ones."""

    def __init__(self, root_dir: Path, keep_last: int) -> None:
        """Keep the last `keep_last` of each engine, source and replica, of those written here.

        Those of other runs under the same root are left alone.
        """
        self._path = root_dir / DIRECTORY
        self._keep_last = keep_last
        self._written: defaultdict[str, list[Path]] = defaultdict(list)

    def write(self, subject: Subject, ranks: Sequence[RankComparison]) -> Path:
        """Write one report; the directory, which appears under its name complete.

        Errors: VerificationError if it cannot be written: a check that nobody can look up is none.
        """
        stem = (
            f"{subject.engine}_{subject.source}_replica{subject.replica}_rollout{subject.rollout}_"
        )
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            staged = self._path / f".{stem}{time.time_ns()}"
            staged.mkdir()
            _fill(staged, subject, ranks)
            path = staged.rename(self._free_name(stem))
        except OSError as error:
            msg = f"the report of a live verification cannot be written to {self._path}: {error}"
            raise VerificationError(msg) from error
        self._written[stem].append(path)
        self._remove_old(self._written[stem])
        return path

    def _free_name(self, stem: str) -> Path:
        milliseconds = time.time_ns() // 1_000_000
        while (path := self._path / f"{stem}{milliseconds}").exists():
            milliseconds += 1
        return path

    def _remove_old(self, written: list[Path]) -> None:
        while len(written) > self._keep_last:
            shutil.rmtree(written.pop(0), ignore_errors=True)


def _fill(path: Path, subject: Subject, ranks: Sequence[RankComparison]) -> None:
    about = msgspec.structs.asdict(subject)
    for rank in ranks:
        file = path / f"rank_{rank.check.tp_rank}_{DIRECTORY}.json"
        _write(file, {**about, **_of_rank(rank)})
    counts = counts_of(ranks)
    summary = {
        **about,
        "clean": counts.clean,
        "counts": counts,
        "ranks": [rank.check.counts for rank in ranks],
        "bad": bad_tensors(ranks),
    }
    _write(path / SUMMARY, summary)


def _of_rank(rank: RankComparison) -> dict[str, Any]:
    known = rank.expected.tensors
    tensors = {
        name: {
            "live": rank.live.get(name),
            "expected": known[name].digest if name in known else None,
            "slices": known[name].slices if name in known else (),
        }
        for name in dict.fromkeys((*known, *rank.live))
    }
    return {
        "tp_rank": rank.check.tp_rank,
        "counts": rank.check.counts,
        "bad": rank.bad,
        "unverifiable": rank.check.unverifiable,
        "tensors": tensors,
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
