"""The magic buffer: counters and seals through which neighbours in the chain tell what is where.

```
   0  FILLED   (epoch, sequence, tag)   written by the predecessor: its pieces up to here are there
  64  TAKEN    (epoch, sequence, tag)   written by the successor: it has read all up to here
 128           two more, from which this rank's own records are sent
 256  seals    16 bytes for each part of bucket 0 (2, 4, ...), then of bucket 1 (3, 5, ...)
```

Every peer that reaches Mooncake's port can write here, as well as into the buckets. So a record
counts only with the tag of a member of the group, and counters never go back: a torn, forged,
repeated or older record is as good as none. The seal of a part authenticates the digest of its
bytes as the sender packed them; it travels beside the bytes, from rank to rank.
"""

import hashlib
import hmac
import struct
from typing import Final

import torch

from rl_core.transfer.transport import BUFFERS

FILLED: Final = 0
TAKEN: Final = 64
SEAL_BYTES = 16

_STAGE = 128
_SEALS = 256
_RECORD = struct.Struct("<QQ16s")
RECORD_BYTES = _RECORD.size


class Signet:
    """Makes the tags and seals of one version in one group."""

    def __init__(self, key: bytes, group: str, epoch: int) -> None:
        """`key` is the run's, `group` a name that is never used again, `epoch` the version's."""
        text = f"rl-ckpt-mooncake-1 {group}"
        self._key = hmac.digest(key, text.encode(), hashlib.sha256)
        self.epoch = epoch

    def record(self, place: int, writer: int, sequence: int) -> bytes:
        """What rank `writer` of the group writes into FILLED or TAKEN."""
        tag = self._tag(b"counter", place, writer, sequence)
        return _RECORD.pack(self.epoch, sequence, tag)

    def sequence(self, place: int, writer: int, record: bytes) -> int:
        """The counter in a record of rank `writer`; 0 if it is not one."""
        sequence: int = _RECORD.unpack(record)[1]
        genuine = hmac.compare_digest(record, self.record(place, writer, sequence))
        return sequence if genuine else 0

    def seal(self, bucket: int, number: int, digest: bytes) -> bytes:
        """What vouches for part `number` of a bucket."""
        return self._tag(b"part", bucket, number, digest)

    def _tag(self, what: bytes, *numbers: int | bytes) -> bytes:
        state = hashlib.blake2b(what, digest_size=SEAL_BYTES, key=self._key)
        for number in (self.epoch, *numbers):
            state.update(number if isinstance(number, bytes) else number.to_bytes(8, "little"))
        return state.digest()


class MagicBuffer:
    """This rank's own magic buffer, for one version.

    Attributes:
        address: where it begins.
        nbytes: its length.
    """

    def __init__(self, signet: Signet, rank: int, most_parts: int) -> None:
        """`rank` is this rank's in the group; nothing is filled or taken yet."""
        self.nbytes = _SEALS + BUFFERS * SEAL_BYTES * most_parts
        self._tensor = torch.zeros(self.nbytes, dtype=torch.uint8)
        self._view = memoryview(self._tensor.numpy())
        self.address: int = self._tensor.data_ptr()
        self._signet = signet
        self._writers = {FILLED: rank - 1, TAKEN: rank + 1}
        self._rank = rank
        self._most_parts = most_parts
        self._seen: dict[int, int] = {FILLED: 0, TAKEN: 0}

    def count(self, place: int) -> int:
        """The highest counter that the neighbour has written to FILLED or TAKEN."""
        record = bytes(self._view[place : place + RECORD_BYTES])
        sequence = self._signet.sequence(place, self._writers[place], record)
        self._seen[place] = max(self._seen[place], sequence)
        return self._seen[place]

    def stage(self, place: int, sequence: int) -> int:
        """Make this rank's record for a neighbour's FILLED or TAKEN; the address to send from."""
        at = _STAGE + place
        self._view[at : at + RECORD_BYTES] = self._signet.record(place, self._rank, sequence)
        return self.address + at

    def set_seal(self, bucket: int, number: int, digest: bytes) -> None:
        """Vouch for part `number` of a bucket (sender)."""
        at = seals_at(bucket, self._most_parts) + SEAL_BYTES * number
        self._view[at : at + SEAL_BYTES] = self._signet.seal(bucket, number, digest)

    def vouches(self, bucket: int, number: int, digest: bytes) -> bool:
        """Whether the seal that lies here is that of a part with this digest (receivers)."""
        at = seals_at(bucket, self._most_parts) + SEAL_BYTES * number
        found = bytes(self._view[at : at + SEAL_BYTES])
        return hmac.compare_digest(found, self._signet.seal(bucket, number, digest))


def seals_at(bucket: int, most_parts: int) -> int:
    """Where the seals of a bucket are in a magic buffer, of any rank."""
    return _SEALS + bucket % BUFFERS * SEAL_BYTES * most_parts
