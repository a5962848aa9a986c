"""The READY marker: what says that a checkpoint is complete, and what is in it.

It is the last file written into a staged directory. A reader believes a directory only if its
marker is there, was made with the key of the run, and describes what the reader expects.
"""

import hashlib
import hmac

import msgspec

from rl_core.errors import ManifestMismatchError, MessageError
from rl_core.metadata import Manifest, Trailer

READY_FILE = "READY"
FORMAT = 1


class Marker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint contains.

    Attributes:
        manifest: version, run and structure.
        structure_hash: hash of the structure, as the manifest gives it.
        trailer: counts and digest of digests.
        max_shard_bytes: with the manifest, tells where each tensor lies (`CheckpointLayout.of`).
        digests: content digest of each tensor by name; empty without light verification.
        files: size in bytes of every file by relative path, this one left out.
        format: version of this record.
    """

    manifest: Manifest
    structure_hash: str
    trailer: Trailer
    max_shard_bytes: int
    digests: dict[str, str]
    files: dict[str, int]
    format: int = FORMAT

    def encode(self, key: bytes) -> bytes:
        """As the file's content: a line of HMAC-SHA256 in hex, then JSON."""
        body = msgspec.json.encode(self)
        return _mac(key, body).encode() + b"\n" + body

    @classmethod
    def decode(cls, content: bytes, key: bytes) -> "Marker":
        """The inverse of `encode`; MessageError if it was not made with `key`, or is malformed."""
        mac, _, body = content.partition(b"\n")
        if not hmac.compare_digest(mac, _mac(key, body).encode()):
            raise MessageError("the READY marker was not written with the key of this run")
        try:
            return msgspec.json.decode(body, type=cls)
        except (msgspec.MsgspecError, ManifestMismatchError) as error:
            raise MessageError(f"the READY marker is malformed: {error}") from error

    def check(self, manifest: Manifest, trailer: Trailer | None = None) -> None:
        """ManifestMismatchError unless this is the checkpoint that is expected.

        Args:
            manifest: what is expected.
            trailer: what the sender said at the end, where it said something.
        """
        theirs, mine = self.manifest, manifest
        if self.format != FORMAT:
            raise ManifestMismatchError(f"checkpoint format {self.format}, expected was {FORMAT}")
        if (theirs.version, theirs.run_id) != (mine.version, mine.run_id):
            msg = (
                f"the checkpoint is of version {theirs.version} of run {theirs.run_id!r}, expected "
                f"was {mine.version} of {mine.run_id!r}"
            )
            raise ManifestMismatchError(msg)
        mine.check_same_structure(theirs)
        self.trailer.check(manifest)
        if trailer is not None:
            trailer.check(manifest)
        if trailer is not None and trailer != self.trailer:
            msg = f"the checkpoint ends with {self.trailer}, the sender said {trailer}"
            raise ManifestMismatchError(msg)


def _mac(key: bytes, body: bytes) -> str:
    return hmac.digest(key, b"rl-ckpt-disk-ready-1" + body, hashlib.sha256).hex()
