"""Live verification of a sync: what the engines compute with, against what the trainer sent."""

import logging
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import msgspec
from msgspec.structs import replace

from minirl.actors import Actors
from minirl.first_difference import first_difference
from minirl.live_comparison import (
    MISMATCHED,
    BadTensor,
    RankComparison,
    bad_tensors,
    compare_replica,
    counts_of,
)
from minirl.live_member import SHOWN_BYTES, LiveName, in_rank_order
from minirl.live_reports import LiveReports, Subject
from minirl.replica_faults import replica_name
from minirl.rollout_manager import RolloutManager
from minirl.sync_record import RESTORED, Moved, SyncRecord
from rl_core.errors import DigestMismatchError, MiniRLError, VerificationError
from rl_core.interfaces import LoadReport
from rl_core.layout import LayoutSpec
from rl_core.logs import kv
from rl_core.rollout.expectation import Expectation
from rl_core.versions import PolicyVersion

_logger = logging.getLogger(__name__)

_NAMED = 3


class LiveSettings(msgspec.Struct, frozen=True):
    """What is verified, and where it is told.

    Attributes:
        spec: the engine's layout of the model.
        source: how the reports name the way that the weights take.
        every: every n-th sync.
        all_replicas: verify every replica, or only the first that takes part.
        strict: what the layout does not cover is an error.
        root_dir: reports are below it.
        keep_last: how many are kept.
        timeout_s: deadline of one replica's digests.
        run_id: of the run.
    """

    spec: LayoutSpec
    source: str
    every: int
    all_replicas: bool
    strict: bool
    root_dir: str
    keep_last: int
    timeout_s: float
    run_id: str


class LiveVerification:
    """Asks replicas that have loaded for digests of what they hold, and compares."""

    def __init__(self, settings: LiveSettings, rollout: RolloutManager, actors: Actors) -> None:
        self._settings = settings
        self._actors = actors
        self._rollout = rollout
        self._reports = LiveReports(Path(settings.root_dir), settings.keep_last)

    def due(self, index: int) -> bool:
        """Whether sync number `index`, from 1, is one of those that are verified."""
        return (index - 1) % self._settings.every == 0

    def verify(
        self, record: SyncRecord, moved: Moved, version: PolicyVersion
    ) -> list[RankComparison]:
        """Compare the replicas of a sync; the ranks of all that were compared.

        The actor still has the weights of `version`. Notes counts and reports in `record`.

        Errors: DigestMismatchError naming what differs, is missing or was not expected;
        VerificationError for what cannot be verified, if the settings are strict.
        """
        wanted = in_rank_order(moved.expected)
        compared: list[RankComparison] = []
        for replica in self._looked_at(record.replicas):
            ranks = self._compare(replica, wanted)
            if record.phase != RESTORED:  # of an older version the actor has nothing to compare
                self._locate(version, replica, ranks)
            compared += ranks
            record.live = msgspec.structs.asdict(counts_of(compared))
            path = self._reports.write(self._subject(record, replica), ranks)
            record.live_reports.append(str(path))
            self._judge(record, replica, ranks, path)
            self._tell(moved.reports[0], ranks, path)
        return compared

    def _looked_at(self, replicas: Sequence[int]) -> list[int]:
        """Those to verify of the replicas of a sync; whoever joins serves nothing unverified."""
        every, joins = self._settings.all_replicas, self._rollout.joins
        return [one for one in replicas if every or one == replicas[0] or joins(one)]

    def _compare(self, replica: int, expected: Sequence[Expectation]) -> list[RankComparison]:
        _logger.info(
            "%s strict runtime weight verification started: %s",
            self._rollout.engine_name,
            kv(replica=replica, source=self._settings.source),
        )
        live = self._rollout.live_digests(replica, self._settings.timeout_s)
        return compare_replica(self._settings.spec, expected, live)

    def _locate(
        self, version: PolicyVersion, replica: int, ranks: Sequence[RankComparison]
    ) -> None:
        """Find where tensors differ; that this may fail is only logged."""
        bad = _located(bad_tensors(ranks))
        if not bad:
            return
        try:
            places = self._places(version, replica, bad)
        except (MiniRLError, TimeoutError) as error:
            _logger.warning("where the live weights differ could not be found out: %s", error)
            return
        for rank in ranks:
            rank.bad = [
                replace(one, first_difference=places.get((one.tp_rank, one.name)))
                for one in rank.bad
            ]

    def _places(
        self, version: PolicyVersion, replica: int, bad: Sequence[BadTensor]
    ) -> dict[LiveName, tuple[int, ...] | None]:
        """By rank and name: for these tensors the weights are gathered once more."""
        settings = self._settings
        wanted = [(one.tp_rank, one.name) for one in bad]
        answers: list[dict[LiveName, bytes]] = self._actors.call(
            "expected_content", version, settings.run_id, wanted, timeout_s=settings.timeout_s
        )
        content = {key: data for answer in answers for key, data in answer.items()}
        found = {}
        for one in bad:
            key = one.tp_rank, one.name
            if key in content:
                live_at = partial(
                    self._rollout.live_content, replica, *key, timeout_s=settings.timeout_s
                )
                found[key] = first_difference(content[key], one.shape, one.dtype, live_at)
        return found

    def _judge(
        self, record: SyncRecord, replica: int, ranks: Sequence[RankComparison], path: Path
    ) -> None:
        counts = counts_of(ranks)
        begin = f"live verification of {record.version} on replica {replica} found {_named(counts)}"
        bad = bad_tensors(ranks)
        if bad:
            told = "; ".join(str(one) for one in bad[:_NAMED])
            error = DigestMismatchError(f"{begin}; {told}; report: {path}", [b.name for b in bad])
            raise error.blaming(replica_name(replica))
        if self._settings.strict and counts.unverifiable:
            reasons = {name: why for r in ranks for name, why in r.check.unverifiable.items()}
            told = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:_NAMED])
            raise VerificationError(f"{begin}, and is strict; {told}; report: {path}")

    def _tell(self, loaded: LoadReport, ranks: Sequence[RankComparison], path: Path) -> None:
        _logger.info(
            "%s rollout strict runtime weight verification passed: %s",
            self._rollout.engine_name,
            kv(
                tensors=loaded.tensors,
                bytes=loaded.nbytes,
                live_digest_dir=path,
                live_digest_summary=str(msgspec.structs.asdict(counts_of(ranks))),
            ),
        )

    def _subject(self, record: SyncRecord, replica: int) -> Subject:
        return Subject(
            engine=self._rollout.name,
            source=self._settings.source,
            replica=replica,
            rollout=replica * self._rollout.tp_size,
            version=record.version,
            family=self._settings.spec.family,
        )


def _located(bad: Sequence[BadTensor]) -> list[BadTensor]:
    """Those that differ and are looked into: as many as can be held at once, and a few always."""
    differ = [one for one in bad if one.kind == MISMATCHED]
    sizes = accumulate(min(one.nbytes, SHOWN_BYTES) for one in differ)
    return [
        one
        for n, (one, held) in enumerate(zip(differ, sizes, strict=True))
        if n < _NAMED or held <= SHOWN_BYTES
    ]


def _named(counts: msgspec.Struct) -> str:
    return kv(**msgspec.structs.asdict(counts))
