"""Content digests of tensors, and the digest of digests of a whole version.

A digest is text, `<kind>:<hex>`, so that its kind is in every record. Kinds:

* `xxh3-128`: over the bytes, for hosts. It finds faults, not forgers: messages are authenticated
  separately (`rl_core.channel`);
* `wsum64`: an order-sensitive integer reduction that a device computes itself (`rl_core.torch`).

Digests of different kinds are never compared. Each is bound to the tensor's name, shape and dtype,
but not to a version: equal weights have equal digests whichever step produced them.
"""

from collections.abc import Mapping

import msgspec
import xxhash

from rl_core.errors import DigestMismatchError, VerificationError
from rl_core.metadata import TensorMeta

XXH3_128 = "xxh3-128"
WSUM64 = "wsum64"
KINDS = (XXH3_128, WSUM64)

BytesLike = bytes | bytearray | memoryview


def header(meta: TensorMeta) -> bytes:
    """The bytes that bind a digest to its tensor: name, shape, dtype."""
    return msgspec.msgpack.encode((meta.name, meta.shape, meta.dtype))


def xxh3_128(meta: TensorMeta, *chunks: BytesLike) -> str:
    """Digest of a tensor whose bytes are given in row-major order, in any number of chunks."""
    state = xxhash.xxh3_128(header(meta))
    for chunk in chunks:
        state.update(chunk)
    return f"{XXH3_128}:{state.hexdigest()}"


class ByteDigest:
    """The `xxh3-128` of bytes that come in runs and belong to no tensor: 16 bytes, not text."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: BytesLike) -> None:
        """Add the next run."""
        self._state.update(data)

    def digest(self) -> bytes:
        """Of everything so far."""
        return self._state.digest()


def kind_of(digest: str) -> str:
    """The kind of a digest; VerificationError if it is not one."""
    kind, _, value = digest.partition(":")
    if kind not in KINDS or not value:
        raise VerificationError(f"not a digest: {digest!r}; known kinds: {', '.join(KINDS)}")
    return kind


def same(left: str, right: str) -> bool:
    """Whether two digests agree; VerificationError if they are of different kinds."""
    if kind_of(left) != kind_of(right):
        raise VerificationError(f"digests of different kinds are not comparable: {left}, {right}")
    return left == right


def check(name: str, expected: str, found: str) -> None:
    """DigestMismatchError naming the tensor, unless the two digests agree."""
    if not same(expected, found):
        msg = f"tensor {name!r} differs from what was sent: expected {expected}, found {found}"
        raise DigestMismatchError(msg, [name])


def digest_of_digests(digests: Mapping[str, str]) -> str:
    """One digest for a version: over the tensors' names and digests, sorted by name."""
    kinds = {kind_of(digest) for digest in digests.values()}
    if len(kinds) > 1:
        raise VerificationError(f"digests of different kinds in one version: {sorted(kinds)}")
    state = xxhash.xxh3_128()
    for item in sorted(digests.items()):
        state.update(msgspec.msgpack.encode(item))
    return f"{XXH3_128}:{state.hexdigest()}"
