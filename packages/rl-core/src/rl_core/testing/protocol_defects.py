"""Defects of what all engines over `rl_core.transfer` share, patched in for a while."""

from __future__ import annotations

import hmac
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

from rl_core import digests
from rl_core.buckets import BucketCursor, Slot, align
from rl_core.deadlines import Deadline
from rl_core.testing.checkpoint_defects import Defect
from rl_core.torch import as_bytes, from_bytes
from rl_core.transfer import packing, reception
from rl_core.transfer.messages import Ack, BucketEntry, BucketReady
from rl_core.transfer.packing import Packer
from rl_core.transfer.peers import Peers
from rl_core.transfer.unpacking import Unpacker
from rl_core.transfer.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from rl_core.metadata import Manifest, TensorMeta, Trailer
    from rl_core.transfer.plan import Part

_FOREVER_S = 1e6
_SLOTS, _WAIT = BucketCursor.slots, Peers._wait
_ENTRY, _OPEN, _CHECK = Packer._entry, Unpacker.open, reception.check_announcement


def patched(defect: Defect) -> AbstractContextManager[object]:
    """What a defect needs changed in shared code, for as long as the context lasts."""
    owner, name, made = _PATCHES.get(defect, (None, "", None))
    return nullcontext() if owner is None else mock.patch.object(owner, name, made)


def _unaligned_slots(cursor: BucketCursor, nbytes: int) -> Iterator[Slot]:
    with mock.patch("rl_core.buckets.align", lambda size: size):
        slots = list(_SLOTS(cursor, nbytes))
    yield from slots


def _asserting_slots(cursor: BucketCursor, nbytes: int) -> Iterator[Slot]:
    assert align(nbytes) <= cursor._capacity, "tensor does not fit, raise the bucket size"
    return _SLOTS(cursor, nbytes)


def _xor_digest(meta: TensorMeta, tensor: torch.Tensor, kind: str) -> str:
    del kind
    words = as_bytes(tensor)
    return f"{digests.XXH3_128}:{int(words.sum()) if words.numel() else meta.nbytes:032x}"


def _patient_wait(peers: Peers, watch: Watch, what: str, ranks: Any) -> None:
    forever = Watch(Deadline.after(_FOREVER_S), watch._tokens, watch._news)
    _WAIT(peers, forever, what, ranks)


def _late_entry(packer: Packer, part: Part) -> BucketEntry:
    """Digests of the bytes that go into the buckets."""
    packer._bytes_of(part)
    if packer._tensor is not None and packer._data is not None:
        packer._tensor = from_bytes(packer._data, part.meta)
    return _ENTRY(packer, part)


def _acknowledged_anyhow(peers: Peers, rank: int, bucket: int) -> bool:
    while peers._acked[rank] < bucket:
        if peers._ends[rank].take(Ack) is None:
            return False
        peers._acked[rank] += 1
    return True


def _opened_as_planned(
    unpacker: Unpacker, announced: BucketReady, buffer: torch.Tensor
) -> list[Any]:
    parts = unpacker._plan.buckets[announced.bucket].parts
    digests_of = {entry.name: entry.digest for entry in announced.entries}
    entries = tuple(
        BucketEntry(part.meta.name, part.slot, digests_of.get(part.meta.name)) for part in parts
    )
    return _OPEN(unpacker, msgspec.structs.replace(announced, entries=entries), buffer)


def _closed_anyhow(unpacker: Unpacker, trailer: Trailer) -> None:
    unpacker._check.close()
    trailer.check(unpacker._manifest)


def _any_kind(begin: Any, manifest: Manifest, digest_kind: str | None) -> None:
    del digest_kind
    _CHECK(begin, manifest, None)


class _NeverRaised(Exception):  # noqa: N818 - stands for the decoder's own
    """What nobody raises, so that nothing is caught."""


_PATCHES: dict[Defect, tuple[Any, str, Any]] = {
    Defect.UNALIGNED: (BucketCursor, "slots", _unaligned_slots),
    Defect.OVERSIZED: (BucketCursor, "slots", _asserting_slots),
    Defect.XOR_DIGEST: (packing, "content_digest", _xor_digest),
    Defect.UNSIGNED: (hmac, "compare_digest", lambda mine, theirs: True),
    Defect.PATIENT: (Peers, "_wait", _patient_wait),
    Defect.LATE_DIGEST: (Packer, "_entry", _late_entry),
    Defect.UNCOUNTED_ACKS: (Peers, "_acknowledged", _acknowledged_anyhow),
    Defect.UNREAD_CONTENTS: (Unpacker, "open", _opened_as_planned),
    Defect.ANY_TRAILER: (Unpacker, "close", _closed_anyhow),
    Defect.ANY_KIND: (reception, "check_announcement", _any_kind),
    Defect.MALFORMED: (msgspec, "MsgspecError", _NeverRaised),
}
"""By defect: where the name is, the name, and what stands for it."""
