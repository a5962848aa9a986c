"""Lies about buckets, told by a member in well-formed messages; as `channel_forgeries`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rl_core.errors import ManifestMismatchError, MessageError
from rl_core.testing.channel_forgeries import SENDER, Forgery, said_otherwise
from rl_core.transfer.messages import Ack, Begin, BucketEntry, BucketReady

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.interfaces import CheckpointEngine


def huge_buckets(engine: CheckpointEngine, _: str) -> None:
    """A bucket that nobody's memory holds is announced."""
    said_otherwise(
        engine, Begin, lambda message: [msgspec.structs.replace(message, bucket_bytes=1 << 50)]
    )


def other_bucket(engine: CheckpointEngine, _: str) -> None:
    """The first bucket is announced under the number of a later one."""
    said_otherwise(
        engine,
        BucketReady,
        lambda message: [msgspec.structs.replace(message, bucket=message.bucket + 1)],
    )


def other_names(engine: CheckpointEngine, _: str) -> None:
    """What is in a bucket is announced under the names of its neighbours."""

    def turned(entries: tuple[BucketEntry, ...]) -> tuple[BucketEntry, ...]:
        names = [entry.name for entry in reversed(entries)]
        return tuple(
            msgspec.structs.replace(entry, name=name)
            for entry, name in zip(entries, names, strict=True)
        )

    _contents(engine, turned)


def other_places(engine: CheckpointEngine, _: str) -> None:
    """Every tensor is announced a little behind where it is."""

    def moved(entries: tuple[BucketEntry, ...]) -> tuple[BucketEntry, ...]:
        return tuple(
            msgspec.structs.replace(
                entry, slot=msgspec.structs.replace(entry.slot, offset=entry.slot.offset + 1)
            )
            for entry in entries
        )

    _contents(engine, moved)


def fewer_tensors(engine: CheckpointEngine, _: str) -> None:
    """The last tensor of a bucket is left out."""
    _contents(engine, lambda entries: entries[:-1])


def without_digests(engine: CheckpointEngine, _: str) -> None:
    """Digests were agreed on, and none comes."""
    _contents(
        engine,
        lambda entries: tuple(msgspec.structs.replace(entry, digest=None) for entry in entries),
    )


def ahead(engine: CheckpointEngine, _: str) -> None:
    """A receiver acknowledges the bucket after the one that it has read."""
    said_otherwise(engine, Ack, lambda message: [Ack(message.bucket + 1)])


_PLANNED = "not those planned"
BUCKET_FORGERIES = {
    forgery.function.rpartition(":")[2]: forgery
    for forgery in (
        Forgery(f"{__name__}:huge_buckets", SENDER, MessageError, "makes no sense"),
        Forgery(f"{__name__}:other_bucket", SENDER, MessageError, "due was 0"),
        Forgery(f"{__name__}:other_names", SENDER, MessageError, _PLANNED),
        Forgery(f"{__name__}:other_places", SENDER, MessageError, _PLANNED),
        Forgery(f"{__name__}:fewer_tensors", SENDER, MessageError, _PLANNED),
        Forgery(f"{__name__}:without_digests", SENDER, ManifestMismatchError, "agreed was"),
        Forgery(f"{__name__}:ahead", ("receiver 0",), MessageError, "due was 0"),
    )
}
"""All lies by name."""


def _contents(
    engine: CheckpointEngine,
    change: Callable[[tuple[BucketEntry, ...]], tuple[BucketEntry, ...]],
) -> None:
    def changed(message: BucketReady) -> list[Any]:
        return [msgspec.structs.replace(message, entries=change(message.entries))]

    said_otherwise(engine, BucketReady, changed)
