"""One weight sync in data: what is to be done, what came of it, and what is kept of it."""

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from minirl.live_member import Expected
from minirl.perturbation import PERTURBED
from rl_core.interfaces import LoadReport
from rl_core.transfer.phases import Phases
from rl_core.versions import PolicyVersion

RESTORED = "restored"
"""Phase of a sync that puts the version back which was served before one that failed."""


class Order(msgspec.Struct, frozen=True):
    """One sync to be carried out.

    Attributes:
        version: of the weights that the actor has now.
        index: number of the sync, from 1.
        live: whether what the engines must hold is to be derived on the way.
    """

    version: PolicyVersion
    index: int
    live: bool = False


class Moved(msgspec.Struct, frozen=True):
    """What a transfer brought.

    Attributes:
        reports: of the engine ranks that loaded themselves.
        expected: of the actor ranks, if the order was to look on.
        ranks: the rollout ranks of the reports, where a checkpoint engine brought the weights.
        digest: digest of digests of what was sent then; None without light verification.
    """

    reports: list[LoadReport]
    expected: Sequence[Expected] = ()
    ranks: Sequence[int] = ()
    digest: str | None = None


class SyncRecord(msgspec.Struct):
    """One weight sync, as `summary.json` shows it, whether it published its version or failed.

    `light` and `live` hold the counts of a verification, or None where it was off; `replicas` the
    numbers of those that took part. `error` is the failure, or None for one that ended well; the
    counts of a failed sync are those known when it ended. `live_reports` are the directories of
    the live verification's reports. `perturbation` says what was proved by changing the weights:
    of the sync that carried the changed ones, which is never published, and of the one after it.
    `given_up` are the replicas that this sync was the last one of, and why; `repeats` is the
    number of the sync that failed with them, and that this one repeats with the others, or of the
    one that published what this one puts back (phase restored).
    """

    sync_index: int
    phase: str
    version: str
    backend: str
    payload_bytes: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = {}
    weights_digest: str | None = None
    light: dict[str, int] | None = None
    live: dict[str, int] | None = None
    replicas: list[int] = []
    error: str | None = None
    live_reports: list[str] = []
    perturbation: dict[str, Any] | None = None
    given_up: dict[int, str] = {}
    repeats: int | None = None


def last_published(records: Sequence[SyncRecord]) -> SyncRecord | None:
    """What is to be put back if the sync after these fails; None without any.

    Nor if that has been done already and nothing was published since: what fails twice in a row
    will not mend itself, and the samples only grow older.
    """
    served = [one for one in records if one.error is None and one.phase != PERTURBED]
    return served[-1] if served and served[-1].phase != RESTORED else None


class Clock(Phases):
    """Seconds by phase of one sync; a phase is there once it was."""

    def __init__(self) -> None:
        super().__init__()
        self._begin = time.perf_counter()
        self.seconds = defaultdict(float)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Account the block to phase `name`; the same one may come more than once."""
        return self(name)

    def total(self) -> float:
        """Seconds since the sync began."""
        return time.perf_counter() - self._begin
