"""Receiver: one version on its way in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_core.buckets import ALIGNMENT, align
from rl_core.digests import KINDS
from rl_core.errors import MessageError, StaleVersionError, VerificationError
from rl_core.transfer.lending import Lending
from rl_core.transfer.messages import Ack, Begin, BucketReady, Complete, Done, End, Go, Ready
from rl_core.transfer.plan import TransferPlan
from rl_core.transfer.transport import BUFFERS
from rl_core.transfer.unpacking import JoinBuffer, Unpacker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_core.interfaces import BucketLease
    from rl_core.metadata import Manifest
    from rl_core.transfer.link import Link
    from rl_core.transfer.transport import Inlet, Transport
    from rl_core.transfer.watch import Watch


class Reception(Lending):
    """The leases of one version; see `rl_core.transfer.messages` for the order."""

    def __init__(
        self,
        manifest: Manifest,
        digest_kind: str | None,
        link: Link,
        transport: Transport,
        join: JoinBuffer,
        watch: Watch,
    ) -> None:
        """`watch` without news; `digest_kind` is what this side insists on, or None."""
        super().__init__()
        self._manifest = manifest
        self._kind = digest_kind
        self._link = link
        self._transport = transport
        self._join = join
        self._watch = watch

    def run(self) -> Iterator[BucketLease]:
        """Handshake, buckets, trailer."""
        begin = self._link.expect(Begin, self._watch)
        check_begin(begin, self._manifest, self._kind)
        watch = self._watch.sooner(begin.seconds)
        plan = TransferPlan.of(self._manifest.tensors, begin.bucket_bytes, begin.direct_bytes)
        inlet = self._transport.inlet(plan, begin.properties, watch.hearing(self.hear))
        self._link.tell(Ready(inlet.properties()), watch)
        inlet.introduced(self._link.expect(Go, watch).properties)
        unpacker = Unpacker(plan, self._manifest, begin.digest_kind, self._join)
        yield from self._buckets(len(plan.buckets), inlet, unpacker, watch)
        unpacker.close(self._link.expect(End, watch).trailer)
        self._link.tell(Done(), watch)
        self._link.expect(Complete, watch)
        inlet.close()

    def _buckets(
        self, count: int, inlet: Inlet, unpacker: Unpacker, watch: Watch
    ) -> Iterator[BucketLease]:
        for bucket in range(min(BUFFERS, count)):
            inlet.start(bucket)
        for bucket in range(count):
            announced = self._link.expect(BucketReady, watch)
            if announced.bucket != bucket:
                raise MessageError(f"bucket {announced.bucket} was announced, due was {bucket}")
            entries = unpacker.open(announced, inlet.finish(bucket))
            if entries:
                yield self.lend(entries)
                self.check_returned()
            watch.check("the consumer to go on")
            self._link.tell(Ack(bucket), watch)
            if bucket + BUFFERS < count:
                inlet.start(bucket + BUFFERS)

    def hear(self) -> None:
        """Raise what the sender has reported, or that it is gone."""
        self._link.pump(self._watch.deadline)


MOST_BUCKETS = 1 << 20
"""What a receiver plans for; a terabyte in buckets of a mebibyte."""


def check_begin(begin: Begin, manifest: Manifest, digest_kind: str | None) -> None:
    """As `check_announcement`, and MessageError for buckets that make no sense."""
    check_announcement(begin, manifest, digest_kind)
    most = max(ALIGNMENT, sum(align(meta.nbytes) for meta in manifest.tensors))
    least = max(1, most // MOST_BUCKETS)
    if begin.bucket_bytes % ALIGNMENT or not least <= begin.bucket_bytes <= most:
        msg = f"a bucket of {begin.bucket_bytes} bytes makes no sense for {most} bytes of payload"
        raise MessageError(msg)
    if begin.direct_bytes < 0:
        raise MessageError(f"negative size of direct tensors: {begin.direct_bytes}")


def check_announcement(begin: Begin, manifest: Manifest, digest_kind: str | None) -> None:
    """Compare what the sender announces with what is expected here.

    Errors: StaleVersionError (another version or run), ManifestMismatchError naming the first
    tensor that differs, VerificationError (no digests of the kind insisted on), MessageError.
    """
    theirs, mine = begin.manifest, manifest
    if (theirs.run_id, theirs.version) != (mine.run_id, mine.version):
        msg = (
            f"the sender announces version {theirs.version} of run {theirs.run_id!r}, expected "
            f"was {mine.version} of {mine.run_id!r}"
        )
        raise StaleVersionError(msg)
    mine.check_same_structure(theirs)
    if begin.structure_hash != mine.structure_hash:
        raise MessageError("the sender's manifest does not have the hash that it announces")
    if digest_kind is not None and begin.digest_kind != digest_kind:
        msg = f"this receiver insists on {digest_kind} digests, the sender has {begin.digest_kind}"
        raise VerificationError(msg)
    if begin.digest_kind not in (None, *KINDS):
        raise MessageError(f"unknown kind of digest: {begin.digest_kind!r}")
