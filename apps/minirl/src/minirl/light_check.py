"""What the engine ranks report of a load: whether it was verified on the way, how long it took."""

from minirl.replica_faults import receiver_name
from minirl.sync_record import Moved
from rl_core.errors import VerificationError
from rl_core.interfaces import LoadReport
from rl_core.tensor_counts import TensorCounts


def check_verified(moved: Moved, published: str | None) -> None:
    """Every rank must have recomputed every digest, and all must agree on the whole.

    Also with what was sent, if that is known, and with what was `published` under that version
    before, if it was.
    """
    reports = moved.reports
    digests = {report.weights_digest for report in reports}
    clean = all(report.counts.clean for report in reports)
    sent = {moved.digest} if moved.digest is not None else digests
    if not clean or None in digests or len(digests) != 1 or digests != sent:
        counts = [report.counts for report in reports]
        msg = f"light verification is incomplete, or ranks differ; by rank {counts}, {digests}"
        raise VerificationError(msg).blaming(_differing(moved))
    if published is not None and digests != {published}:
        msg = f"{reports[0].version} was published with digest {published}, now it has {digests}"
        raise VerificationError(msg)


def _differing(moved: Moved) -> str:
    """The first receiver whose report is not what was sent; empty where that cannot be told."""
    for rank, report in zip(moved.ranks, moved.reports, strict=False):
        other = moved.digest is not None and report.weights_digest != moved.digest
        if other or not report.counts.clean:
            return receiver_name(rank)
    return ""


def counted(reports: list[LoadReport]) -> TensorCounts:
    """Tensors of all ranks together, by how their verification ended."""
    return sum((report.counts for report in reports), TensorCounts())


def slowest(reports: list[LoadReport]) -> dict[str, float]:
    """Phases inside the engine ranks, the slowest rank's."""
    names = {name for report in reports for name in report.seconds}
    return {name: max(r.seconds.get(name, 0.0) for r in reports) for name in sorted(names)}
