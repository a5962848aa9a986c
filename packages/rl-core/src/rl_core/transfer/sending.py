"""Sender: one version on its way out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rl_core.buckets import bucket_bytes
from rl_core.interfaces import TransferReport
from rl_core.transfer.causes import known_cause
from rl_core.transfer.messages import (
    Begin,
    BucketEntry,
    BucketReady,
    Complete,
    Done,
    End,
    Go,
    Ready,
)
from rl_core.transfer.packing import Packer
from rl_core.transfer.phases import Phases
from rl_core.transfer.plan import TransferPlan
from rl_core.transfer.transport import TransportError

if TYPE_CHECKING:
    from rl_core.interfaces import TensorStream, TransferRole
    from rl_core.metadata import Manifest
    from rl_core.transfer.peers import Peers
    from rl_core.transfer.transport import Outlet, Transport
    from rl_core.transfer.watch import Watch


class Sending:
    """Handshake, buckets, trailer; see `rl_core.transfer.messages` for the order."""

    def __init__(
        self, role: TransferRole, peers: Peers, transport: Transport, watch: Watch
    ) -> None:
        """`watch` without news; this object adds those of the peers for the transport."""
        self._role = role
        self._peers = peers
        self._transport = transport
        self._watch = watch
        self._phases = Phases("gather", "pack", "wire", "ack")

    def run(self, weights: TensorStream, manifest: Manifest) -> TransferReport:
        """Send the stream to every receiver; returns when all have handed over everything."""
        try:
            return self._run(weights, manifest)
        except TransportError as error:
            raise known_cause(error, lambda: self._peers.pump(self._watch)) from error

    def _run(self, weights: TensorStream, manifest: Manifest) -> TransferReport:
        begin = time.perf_counter()
        plan, direct = self._plan(manifest)
        outlet = self._transport.outlet(plan, self._watch.hearing(self._hear))
        self._handshake(manifest, plan.bucket_bytes, direct, outlet)
        kind = self._role.digest_kind
        packer = Packer(plan, manifest, kind, outlet, self._phases)
        trailer = packer.pack(weights, self)
        self._watch.check("the end of the stream")
        with self._phases("ack"):
            self._peers.await_ack(len(plan.buckets) - 1, self._watch)
            self._peers.tell(End(trailer), self._watch)
            self._peers.gather(Done, self._watch)
        with self._phases("wire"):
            outlet.finish()
        self._peers.tell(Complete(), self._watch)
        seconds = {**self._phases.seconds, "total": time.perf_counter() - begin}
        return TransferReport(trailer.nbytes, len(plan.buckets), seconds, trailer.weights_digest)

    def admit(self, bucket: int) -> None:
        """Wait until so few buckets are unacknowledged that this one may be filled."""
        self._watch.check(f"bucket {bucket} to be filled")  # also when nothing is to be waited for
        self._peers.await_ack(bucket - self._transport.window, self._watch)

    def announce(self, bucket: int, entries: tuple[BucketEntry, ...]) -> None:
        """Tell the receivers what is in a bucket."""
        self._peers.tell(BucketReady(bucket, entries), self._watch)

    def _plan(self, manifest: Manifest) -> tuple[TransferPlan, int]:
        size = bucket_bytes(self._role.bucket_megabytes, manifest.tensors)
        direct = self._transport.direct_bytes(size)
        return TransferPlan.of(manifest.tensors, size, direct), direct

    def _handshake(self, manifest: Manifest, size: int, direct: int, outlet: Outlet) -> None:
        self._peers.begin()
        begin = Begin(
            manifest,
            manifest.structure_hash,
            size,
            direct,
            self._role.digest_kind,
            self._watch.deadline.remaining(),
            outlet.properties(),
        )
        self._peers.tell(begin, self._watch)
        ready = self._peers.gather(Ready, self._watch)
        introductions = outlet.introduce({rank: said.properties for rank, said in ready.items()})
        goes = {rank: Go(introductions.get(rank, {})) for rank in ready}
        self._peers.tell_each(goes, self._watch)

    def _hear(self) -> None:
        self._peers.pump(self._watch)
