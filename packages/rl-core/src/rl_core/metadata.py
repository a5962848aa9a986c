"""What is said about weights before and after the bytes: tensor metadata, manifest, trailer.

The *manifest* is the structure of one version: known before the first byte moves, identical on
every side, compared by its hash in the handshake. The *trailer* closes the stream: how many
tensors and bytes there were and one digest over all content digests.
"""

import math
from collections.abc import Iterable, Mapping
from functools import cached_property

import msgspec
import xxhash

from rl_core.errors import ManifestMismatchError
from rl_core.tensor_counts import TensorCounts
from rl_core.versions import PolicyVersion

DTYPE_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
"""Element sizes in bytes of the dtypes that travel; torch's names, without prefix."""


class TensorMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One logical tensor, under its Hugging Face checkpoint name.

    Attributes:
        name: Hugging Face name, such as `model.layers.0.mlp.up_proj.weight`.
        shape: full (unsharded) shape; `()` for a 0-d tensor.
        dtype: dtype on the wire, a key of `DTYPE_BYTES`.
        source_dtype: dtype at the trainer where it differs (a lossy cast is then visible).
        aliases: further names of the same storage (tied embeddings); they have no bytes of
            their own and follow this tensor.
        target: model the tensor belongs to: `policy`, or `draft` for a speculative model.
        quantisation: quantisation scheme of the bytes, or None for plain values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source_dtype: str | None = None
    aliases: tuple[str, ...] = ()
    target: str = "policy"
    quantisation: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            msg = f"tensor {self.name!r} has dtype {self.dtype!r}; on the wire go: {known}"
            raise ManifestMismatchError(msg)
        if any(size < 0 for size in self.shape):
            msg = f"tensor {self.name!r} has a negative size in its shape {self.shape}"
            raise ManifestMismatchError(msg)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without padding."""
        return self.numel * DTYPE_BYTES[self.dtype]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The structure of one version of the weights.

    Attributes:
        version: the version that the tensors make up.
        tensors: every tensor that will travel, in stream order.
        run_id: the run that published it; versions of different runs are never compared.
    """

    version: PolicyVersion
    tensors: tuple[TensorMeta, ...]
    run_id: str = ""

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for meta in self.tensors:
            for name in (meta.name, *meta.aliases):
                if name in seen:
                    msg = f"tensor {name!r} appears twice in the manifest of {self.version}"
                    raise ManifestMismatchError(msg)
                seen.add(name)

    @cached_property
    def by_name(self) -> Mapping[str, TensorMeta]:
        """Tensors by their own name (aliases are not keys)."""
        return {meta.name: meta for meta in self.tensors}

    @property
    def nbytes(self) -> int:
        """Payload bytes of the whole version, without padding."""
        return sum(meta.nbytes for meta in self.tensors)

    @cached_property
    def structure_hash(self) -> str:
        """xxh3-128 over the tensors' metadata, in order; the version is left out of it."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self.tensors))

    def check_same_structure(self, other: "Manifest") -> None:
        """ManifestMismatchError naming the first difference, unless the structures are equal."""
        if self.structure_hash == other.structure_hash:
            return
        for mine, theirs in zip(self.tensors, other.tensors, strict=False):
            if mine != theirs:
                msg = f"manifests differ at tensor {mine.name!r}: {mine} against {theirs}"
                raise ManifestMismatchError(msg)
        msg = (
            f"manifests differ in length: {len(self.tensors)} against {len(other.tensors)} tensors"
        )
        raise ManifestMismatchError(msg)


class Trailer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What closes a stream, so that a short one is noticed.

    Attributes:
        version: the version that was streamed.
        tensors: number of tensors handed over.
        nbytes: their payload bytes.
        weights_digest: digest of the content digests (`digest_of_digests`), or None where no
            content digests were computed.
    """

    version: PolicyVersion
    tensors: int
    nbytes: int
    weights_digest: str | None = None

    def check(self, manifest: Manifest) -> None:
        """ManifestMismatchError unless count, bytes and version are the manifest's."""
        mine = (self.version, self.tensors, self.nbytes)
        announced = (manifest.version, len(manifest.tensors), manifest.nbytes)
        if mine != announced:
            msg = (
                f"the stream ended with (version, tensors, bytes) = ({mine[0]}, {mine[1]}, "
                f"{mine[2]}), announced were ({announced[0]}, {announced[1]}, {announced[2]})"
            )
            raise ManifestMismatchError(msg)


class ManifestCheck:
    """Compares a stream of tensors with its manifest as they pass, on any side.

    Tensors may come in any order, each exactly once.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._open = dict(manifest.by_name)
        self._nbytes = 0

    def see(self, meta: TensorMeta) -> None:
        """Account for one tensor; ManifestMismatchError names an unknown or repeated one."""
        announced = self._open.pop(meta.name, None)
        if announced is None:
            self._reject(meta.name)
        if (announced.shape, announced.dtype) != (meta.shape, meta.dtype):  # type: ignore[union-attr]
            msg = f"tensor {meta.name!r} arrived as {meta}, announced was {announced}"
            raise ManifestMismatchError(msg).counting(TensorCounts(mismatched=1))
        self._nbytes += meta.nbytes

    def close(self) -> Trailer:
        """The trailer, without a digest; ManifestMismatchError names what is missing."""
        if self._open:
            names = list(self._open)
            msg = (
                f"{len(names)} of {len(self._manifest.tensors)} tensors of version "
                f"{self._manifest.version} never arrived; the first is {names[0]!r}"
            )
            raise ManifestMismatchError(msg).counting(TensorCounts(missing=len(names)))
        return Trailer(self._manifest.version, len(self._manifest.tensors), self._nbytes)

    def _reject(self, name: str) -> None:
        if name in self._manifest.by_name:
            msg = f"tensor {name!r} arrived twice in version {self._manifest.version}"
        else:
            near = nearest(name, self._manifest.by_name)
            msg = f"tensor {name!r} is not in the manifest; the nearest name is {near!r}"
        raise ManifestMismatchError(msg).counting(TensorCounts(unexpected=1))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, for messages; None if nothing is known."""
    import difflib

    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return matches[0] if matches else None
