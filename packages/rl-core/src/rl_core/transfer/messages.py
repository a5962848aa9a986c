"""What the sender and a receiver say to each other while a version is moved.

One connection for each receiver (`rl_core.channel`), strictly in this order:

```
receiver                    sender
  Join            ──►                      once for each group
                  ◄──     Joined
                  ◄──     Begin            once for each version
  Ready           ──►
                  ◄──     Go               nothing moves before everybody is ready
                  ◄──     BucketReady      for every bucket, beside its bytes
  Ack             ──►                      after the last reader left the bucket
                  ◄──     End              trailer
  Done            ──►
                  ◄──     Complete         everybody has everything
  Failed         ◄─►      Failed           at any time instead; ends the sync on every side
```
"""

from typing import TypeAlias

import msgspec

from rl_core.buckets import Slot
from rl_core.metadata import Manifest, Trailer
from rl_core.remote_errors import RemoteError

PROTOCOL = 1
"""Version of these messages; both sides must have the same."""


class Join(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A receiver asks to be let into a group.

    Attributes:
        protocol: its `PROTOCOL`.
        run_id: its run.
        rank: its rank in the group.
        group: name of the group (`group_name`), equal for all who were given the same members.
    """

    protocol: int
    run_id: str
    rank: int
    group: str


class Joined(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All have asked; `properties` is what the transport needs to connect."""

    properties: dict[str, str] = {}


class Begin(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The parameters of one version, so that the sides cannot disagree.

    Attributes:
        manifest: version, run and structure.
        structure_hash: the sender's hash of that structure.
        bucket_bytes: size of a bucket.
        direct_bytes: tensors of at least this many bytes travel in segments of their own; 0: none.
        digest_kind: kind of the content digests that come with the buckets, or None.
        seconds: left until the sender's deadline.
        properties: the transport's own.
    """

    manifest: Manifest
    structure_hash: str
    bucket_bytes: int
    direct_bytes: int
    digest_kind: str | None
    seconds: float
    properties: dict[str, str] = {}


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The receiver agrees and has its buffers; `properties` is the transport's own."""

    properties: dict[str, str] = {}


class Go(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All are ready; `properties` is what this receiver's transport must know of the others."""

    properties: dict[str, str] = {}


class BucketEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor, or one part of a large one, in a bucket.

    Attributes:
        name: of the tensor; shape and dtype are in the manifest.
        slot: its place.
        digest: of the whole tensor, at its source before packing; with the last part only.
    """

    name: str
    slot: Slot
    digest: str | None = None


class BucketReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Contents of bucket number `bucket`."""

    bucket: int
    entries: tuple[BucketEntry, ...]


class Ack(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Nobody at this receiver reads bucket number `bucket` any more."""

    bucket: int


class End(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All buckets were sent."""

    trailer: Trailer


class Done(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """This receiver handed over every tensor and agrees with the trailer."""


class Complete(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Every receiver is done."""


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The sync has failed on the side that says so, or on another one that told it."""

    error: RemoteError


ToReceiver: TypeAlias = Joined | Begin | Go | BucketReady | End | Complete | Failed
ToSender: TypeAlias = Join | Ready | Ack | Done | Failed
Message: TypeAlias = ToReceiver | ToSender
